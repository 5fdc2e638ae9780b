"""What a compiled kernel's machine code reads before it has written it: a mistake of the assembler.

Found on an H200 in a kernel that packed e4m3 codes by four, stored them and used them as numbers besides: ptxas (of
Triton 3.8) joined two conversions to one and left the upper code of the first pair to be taken from a register that the
conversion writes later. The result was finite or not, as it came.
"""

import re
import subprocess
import tempfile
from pathlib import Path

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_REGISTER = re.compile(r"(?<![\w.])-?\|?R(\d+)\b")
_PREDICATES = re.compile(r"(?:U?P[\dT]+,\s*)+")
# Those write no register, though the first operand may be one.
_NO_RESULT = ("ST", "RED", "BAR", "EXIT", "BRA", "SYNCS", "UTMA", "UBLKCP", "WARPSYNC", "NANOSLEEP")


def reads_before_writes(code: str) -> list[str]:
    """Instructions of straight-line machine code (cuobjdump -sass) that read a register no earlier one has written.

    Registers of more than 32 bits count as written for as many as the instruction may write. PRMT is left out: it is
    used to replace half of a register whose other half nobody reads. R1 is the stack pointer.
    """
    written, found = {1}, []
    for line in code.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        place, name, operands = match.groups()
        rest = _PREDICATES.sub("", operands, count=1)
        result = None if name.startswith(_NO_RESULT) else _REGISTER.match(rest)
        read = [int(r) for r in _REGISTER.findall(rest)[result is not None :]]
        if not name.startswith("PRMT") and not written.issuperset(read):
            found.append(f"{place} {name} {operands}")
        if result is not None:
            written.update(range(int(result[1]), int(result[1]) + _width(name)))
    return found


def _width(name: str) -> int:
    if "MMA" in name:
        return 256 if "GMMA" in name else 4
    if ".128" in name or name.startswith("LDSM"):
        return 4
    pairs = name.startswith(("CS2R", "FADD2", "FMUL2", "FFMA2"))
    return 2 if pairs or ".64" in name or ".WIDE" in name else 1


def assert_sound(built) -> None:
    """A kernel that Triton compiled for an NVIDIA GPU reads nothing before it is written."""
    import triton

    cubin = built.asm.get("cubin")
    if cubin is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        code = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout
    assert len(_LINE.findall(code)) > 20, code[:1000]
    assert reads_before_writes(code) == []
