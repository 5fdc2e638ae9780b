"""The support table: which implementation of which operator runs where, and why.

One row per (operator, implementation). `choose()` walks the rows of an operator in order of preference and returns
the first whose features cover the request, together with the reason in words and why each earlier row was passed
over. A GPU's own measured choices (tuned.py) go ahead of that order. Operators, the doctor, the docs and the tests all
read this table; nothing else decides.

Features of a row: device types, SM list (CUDA only; None is any), layouts, head counts and a cap on k (None is any).
What a kernel can do and where it is worth taking are kept apart: a row with `first` is taken unasked only where that
says so, and everywhere else by name, through `impl=`, a flag of the server or SGLANG_DSA_PLUGIN_IMPL. For kernels of
other packages a measurement decides, and MEASURED (support_vendor.py) is where it is written down.
What a row is stands in support_row.py, the rows themselves in support_own.py and support_vendor.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dsa_plugin import tuned
from sglang_dsa_plugin.support_own import OWN_ROWS
from sglang_dsa_plugin.support_row import ROW_STEPS, Implementation, NotServed, Request, sm_name
from sglang_dsa_plugin.support_vendor import VENDOR_ROWS


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why. steps: what is taken from which number of rows on, of those who ask for it (`by_rows`)
    and where it is not the same for all. unit: what these count.
    """

    implementation: Implementation
    reason: str
    steps: tuple[tuple[int, Implementation], ...] = ()
    unit: str = "rows"

    @property
    def name(self) -> str:
        return self.implementation.name

    @property
    def names(self) -> set[str]:
        """All that are taken, whatever the number of rows."""
        return {self.name, *(row.name for _, row in self.steps)}

    @property
    def words(self) -> str:
        """The name, or the names by rows: "triton, fa3 from 16 rows on, flash_mla from 256"."""
        if not self.steps:
            return self.name
        (_, first), (least, second), *others = self.steps
        later = [f"{row.name} from {number}" for number, row in others]
        return ", ".join([first.name, f"{second.name} from {least} {self.unit} on", *later])


_ROWS = (*VENDOR_ROWS, *OWN_ROWS)


def rows(operator: str | None = None) -> tuple[Implementation, ...]:
    """The table, or the rows of one operator, in order of preference."""
    return tuple(r for r in _ROWS if operator is None or r.operator == operator)


def operators() -> tuple[str, ...]:
    """Every operator, in the table's order."""
    return tuple(dict.fromkeys(row.operator for row in _ROWS))


def choose(
    operator: str,
    *,
    device: torch.device | str,
    impl: str | None = None,
    sm: int | None = None,
    layout: str | None = None,
    heads: int | None = None,
    k: int | None = None,
    dtype: torch.dtype | None = None,
    rows: int | None = None,
    packages: str = "installed",
    planned: bool = False,
) -> Choice:
    """Pick the implementation of `operator` for this device and these features (dtype: of q; rows: query rows;
    packages, planned: see Request).

    `impl` forces a row by name. Raises NotServed, a ValueError, when a forced row cannot run here (with its reason) or
    no row can; ValueError for an operator or a row that there is not.
    """
    kind = device if isinstance(device, str) else device.type
    kind = kind.split(":")[0]
    if kind == "cuda" and sm is None:
        sm = _device_sm(torch.device(device).index or 0)
    step = None if rows is None else max(s for s in ROW_STEPS if s <= rows)
    asked = Request(kind, sm, layout, heads, k, dtype, step, packages, planned)
    # What was measured here says nothing about a machine with other packages.
    if impl is None and kind == "cuda" and packages == "installed":
        best = tuned.preferred(operator, sm, torch.device(device).index, layout, heads, step)
        if best is not None and (choice := _measured(operator, *best, asked)) is not None:
            return choice
    return _choose(operator, impl, asked)


def by_rows(choose_for: Callable[[int], Choice]) -> tuple[tuple[int, Implementation], ...]:
    """What `choose_for(rows)` takes, with the number of rows from which on it does; nothing where it is one for all."""
    found: list[tuple[int, Implementation]] = []
    for step in ROW_STEPS:
        row = choose_for(step).implementation
        if not found or found[-1][1].name != row.name:
            found.append((step, row))
    return tuple(found) if len(found) > 1 else ()


def resolve(
    operator: str, *, device: torch.device | str, impl: str | None = None, **features: Any
) -> Callable[..., Any]:
    """`choose(...)` and load: the callable to run."""
    return choose(operator, device=device, impl=impl, **features).implementation.load()


@functools.lru_cache(maxsize=1024)
def _measured(operator: str, best: str, device: str, asked: Request) -> Choice | None:
    """The row that measured choices (tuned.py) name, where it can run; speed does not buy another result. device: where
    they were measured.
    """
    row = next((r for r in rows(operator) if r.name == best), None)
    if row is None or not row.exact or row.why_not(asked, named=True) is not None:
        return None
    return Choice(row, f"the fastest for this shape as measured on an {device} (sglang-dsa bench tune)")


@functools.lru_cache(maxsize=1024)
def _choose(operator: str, impl: str | None, asked: Request) -> Choice:
    candidates = rows(operator)
    if not candidates:
        known = ", ".join(sorted(operators()))
        raise ValueError(f"unknown operator {operator!r}; known: {known}")
    if impl is not None:
        named = [r for r in candidates if r.name == impl]
        if not named:
            raise ValueError(
                f"{operator}: impl={impl!r} does not exist; it has {', '.join(r.name for r in candidates)}"
            )
        candidates = tuple(named)
    rejected: dict[str, str] = {}
    here = asked.device
    for row in candidates:
        if impl is None and row.by_name_only:
            continue
        why = row.why_not(asked, named=impl is not None)
        if why is None:
            where = asked.device if asked.device != "cuda" else f"cuda {sm_name(asked.sm)}"
            reason = f"asked for by name on {where}" if impl else f"first of the table that serves {where}"
            # What is for other devices says nothing here.
            over = [f"{r.name} ({rejected[r.name]})" for r in candidates if r.name in rejected and here in r.devices]
            return Choice(row, "; ".join([reason, f"passed over: {over[0]}", *over[1:]] if over else [reason]))
        rejected[row.name] = why
    what = f"impl={impl!r} cannot run here" if impl else "no implementation can run here"
    raise NotServed(f"{operator}: {what}: " + "; ".join(f"{n}: {w}" for n, w in rejected.items()))


@functools.cache
def _device_sm(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor
