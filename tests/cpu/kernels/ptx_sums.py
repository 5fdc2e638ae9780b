"""What a kernel's PTX does in f32 with the results of its matrix products, as expressions.

"h3" is relu of the product of head 3 ("h" where its place says nothing of the head), "w" whatever comes from elsewhere.
Operands that may change places without changing a bit are in alphabetical order, so equal expressions are equal bits.
"""

import functools
import re

_STEP = re.compile(r"\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*);")
_NAMES = re.compile(r"%\w+|0f[0-9A-F]{8}|-?\d+")
_ARITHMETIC = ("add", "mul", "fma", "max")
_MOVES = ("shfl.sync.bfly", "mov.b32")


def _steps(ptx):
    """register -> (operation, *operands). A register that is written twice, as in a loop, has no operation."""
    found = {}

    def define(register, *step):
        found[register] = None if register in found else step

    for line in ptx.splitlines():
        match = _STEP.match(line.split("//")[0])
        if not match:
            continue
        operation, rest = match.groups()
        to, _, rest = rest.partition(", ") if not rest.startswith("{") else rest.partition("},")
        names, outputs = _NAMES.findall(rest), _NAMES.findall(to)
        kind = operation.split(".")[0]
        if operation.startswith(("wgmma.mma_async", "mma.sync")):
            # wgmma adds to its registers: four of them one after the other write the same ones.
            for place, register in enumerate(outputs):
                found[register] = (kind, place)
        elif operation == "mov.b64" and to.startswith("{"):
            for half, register in enumerate(outputs):
                define(register, "half", names[0], half)
        elif operation == "mov.b64" and rest.strip().startswith("{"):
            define(outputs[0], "pack", *names)
        elif operation.startswith(_MOVES) or (kind in _ARITHMETIC and operation.endswith((".f32", ".f32x2"))):
            define(outputs[0], kind, *names)
    return found


def sums(ptx, heads):
    """Expressions of all results that nothing in f32 is done with any more, in all threads of a group of four."""
    steps = _steps(ptx)

    @functools.cache
    def counts(register):
        """Whether a product of heads, or what may be one, is in it."""
        step = steps.get(register)
        return bool(step) and (
            step[0] in ("wgmma", "mma", "fma", "max") or any(counts(x) for x in step[1:] if isinstance(x, str))
        )

    @functools.cache
    def value(register, lane, half=None):
        if register.startswith("0f"):
            return "0" if register == "0f00000000" else register
        if not counts(register):
            return "w"
        kind, *operands = steps[register]
        if kind == "wgmma":
            return f"h{(8 * (operands[0] // 4) + 2 * lane + operands[0] % 2) % heads}"
        if kind == "max":
            inner = steps.get(operands[0])
            return value(operands[0], lane) if inner and inner[0] == "wgmma" else "h"
        if kind in ("mov", "shfl"):
            return value(operands[0], lane ^ int(operands[1]) if kind == "shfl" else lane, half)
        if kind in ("half", "pack"):
            return value(operands[0], lane, operands[1]) if kind == "half" else value(operands[half], lane)
        inputs = [value(x, lane, half) for x in operands]
        return f"{kind}({','.join([*sorted(inputs[:2]), *inputs[2:]])})"

    used = {x for step in steps.values() if step for x in step[1:]}
    last = [r for r, step in steps.items() if step and step[0] in ("add", "mul", "fma", "half") and r not in used]
    return {value(r, lane) for r in last if counts(r) for lane in range(4)}
