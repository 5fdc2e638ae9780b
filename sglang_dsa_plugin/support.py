"""The support table: which implementation of which operator runs where, and why.

One row per (operator, implementation). `choose()` walks the rows of an operator in order of preference and returns
the first whose features cover the request, together with the reason in words and why each earlier row was passed
over. Operators, the doctor, the docs and the tests all read this table; nothing else decides.

Features of a row: device types, SM list (CUDA only; None is any), layouts, head counts and a cap on k (None is any).
What a kernel can do and where it is worth taking are kept apart: a row with `first` is taken unasked only where that
says so, and everywhere else by name, through `impl=`, a flag of the server or SGLANG_DSA_PLUGIN_IMPL. For kernels of
other packages a measurement decides, and MEASURED (support_vendor.py) is where it is written down.
Kernels that live only inside sglang join through `register()`; they are never imported here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_dsa_plugin import tuned
from sglang_dsa_plugin.support_row import (
    CLUSTER_SMS,
    HEADS,
    INDEX_MAX_K,
    LARGE_SHARED_SMS,
    MANY_ROWS,
    NO_VENDOR_SMS,
    ROW_STEPS,
    SOME_ROWS,
    TRITON_SMS,
    Implementation,
    Request,
    Where,
    sm_name,
)
from sglang_dsa_plugin.support_vendor import MEASURED, VENDOR_ROWS

__all__ = [
    "MANY_ROWS",
    "MEASURED",
    "Choice",
    "Implementation",
    "Request",
    "Where",
    "choose",
    "register",
    "resolve",
    "rows",
]

_TORCH = "sglang_dsa_plugin.kernels.torch_impl"
_TRITON = "sglang_dsa_plugin.kernels.triton"
_NUMBA = "sglang_dsa_plugin.kernels.numba"
_CUDA = "sglang_dsa_plugin.kernels.cuda"


@dataclass(frozen=True)
class Choice:
    """What was chosen, why, and what was passed over (name -> reason). steps: what is taken from which number of rows
    on, of those who ask for it (`by_rows`) and where it is not the same for all. unit: what these count.
    """

    implementation: Implementation
    reason: str
    rejected: dict[str, str] = field(default_factory=dict)
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


def _torch_row(operator: str, module: str, function: str) -> Implementation:
    return Implementation(
        operator, "torch", f"{_TORCH}.{module}:{function}", note="vectorised torch, memory bounded by tiles; any device"
    )


def _triton_row(operator: str, module: str, function: str, also: str = "", **features: Any) -> Implementation:
    return Implementation(
        operator,
        "triton",
        f"{_TRITON}.{module}:{function}",
        devices=frozenset({"cuda"}),
        sm=TRITON_SMS,
        capturable=True,
        note=f"Triton{also}; run on SM 9.0, compiled for 8.0, 8.6, 8.9, 10.0 and 12.0",
        **features,
    )


def _numba_row(operator: str, module: str, function: str, **features: Any) -> Implementation:
    return Implementation(
        operator,
        "numba",
        f"{_NUMBA}.{module}:{function}",
        devices=frozenset({"cpu"}),
        package="numba",
        note="compiled for the CPU it runs on, one thread",
        **features,
    )


_TORCH_ROWS = [
    _torch_row("quantize_keys", "quant", "quantize_keys"),
    _torch_row("quantize_latent", "quant", "quantize_latent"),
    _torch_row("dequantize_latent", "quant", "dequantize_latent"),
    _torch_row("hadamard", "hadamard", "rotate"),
    _torch_row("rope", "rope", "apply"),
    _torch_row("index_scores_ragged", "index_scores", "ragged"),
    _torch_row("index_scores_paged", "index_scores", "paged"),
    _torch_row("topk", "select", "topk"),
    _torch_row("topk_slots", "select", "topk_slots"),
    _torch_row("topk_ragged", "select", "topk_ragged"),
    _torch_row("positions_to_slots", "select", "positions_to_slots"),
    _torch_row("index_select_ragged", "index_select", "ragged"),
    _torch_row("index_select_paged", "index_select", "paged"),
    _torch_row("sparse_mla", "sparse_mla", "sparse_mla"),
    _torch_row("dense_mha", "dense_mha", "dense_mha"),
    _torch_row("masked_mha", "masked_mha", "masked_mha"),
    _torch_row("key_pages_store", "key_pages", "store"),
    _torch_row("key_pages_load", "key_pages", "load"),
    _torch_row("key_pages_move", "key_pages", "move"),
    _torch_row("index_keys_store", "index_front", "store_keys"),
    _torch_row("index_queries", "index_front", "prepare_queries"),
    _torch_row("index_front", "index_front", "store_and_prepare"),
    _torch_row("latent_rows_store", "latent_rows", "store"),
    _torch_row("latent_rows_load", "latent_rows", "load"),
    _torch_row("latent_rows_move", "latent_rows", "move"),
]

_TRITON_ROWS = [
    _triton_row("index_scores_ragged", "index_scores", "ragged", heads=HEADS),
    _triton_row("index_scores_paged", "index_scores", "paged", heads=HEADS),
    _triton_row("topk", "select", "topk", max_k=INDEX_MAX_K),
    _triton_row("topk_slots", "select", "topk_slots", max_k=INDEX_MAX_K),
    _triton_row("topk_ragged", "select", "topk_ragged", max_k=INDEX_MAX_K),
    _triton_row("positions_to_slots", "select", "positions_to_slots", takes=frozenset({"out"})),
    _triton_row("index_keys_store", "index_front", "store_keys"),
    _triton_row("index_queries", "index_front", "prepare_queries"),
    _triton_row("index_front", "index_front", "store_and_prepare"),
    _triton_row("latent_rows_store", "latent_rows", "store"),
    _triton_row("index_select_ragged", "index_select", "ragged", heads=HEADS, max_k=INDEX_MAX_K),
    _triton_row(
        "index_select_paged",
        "index_select",
        "paged",
        heads=HEADS,
        max_k=INDEX_MAX_K,
        takes=frozenset({"slots_out"}),
    ),
    _triton_row(
        "sparse_mla",
        "sparse_mla",
        "sparse_mla",
        also=", on SM 9.0 Gluon",
        layouts=frozenset({"bf16_1152", "fp8_656", "fp8_576"}),
        heads=HEADS,
        takes=frozenset({"q_rope"}),
    ),
]


def _cuda_row(
    operator: str, module: str, function: str, sm: frozenset[int], what: str, name: str = "cuda", **features: Any
) -> Implementation:
    return Implementation(
        operator,
        name,
        f"{_CUDA}.{module}:{function}",
        devices=frozenset({"cuda"}),
        sm=sm,
        package="cuda.core",
        capturable=True,
        note=f"CUDA C++, compiled for the GPU at hand by NVRTC: {what}",
        **features,
    )


# Ahead of Triton where they were measured faster (docs/benchmarks.md).
_CUDA_ROWS = [
    _cuda_row(
        "sparse_mla",
        "sparse_mla",
        "sparse_mla",
        frozenset({90}),
        "copies, scores and sums in three warpgroups, 16 heads at a time; blocks of a cluster share a row",
        layouts=frozenset({"bf16_1152", "fp8_656"}),
        heads=HEADS,
        dtypes=frozenset({torch.bfloat16}),
        first=Where(sm=frozenset({90}), heads=frozenset(range(1, 17)), min_rows=SOME_ROWS),
        takes=frozenset({"q_rope"}),
    ),
    # What GPUs without a vendor's kernel run for many heads, measured on SM 9.0 against the Triton kernel they ran.
    *(
        _cuda_row(
            "sparse_mla",
            "sparse_mla_portable",
            "sparse_mla",
            TRITON_SMS,
            f"mma.sync, 32 or 64 heads a block, {room}; run on SM 9.0 only, compiled for 8.0, 8.6, 8.9, 10.0 and 12.0",
            name=name,
            layouts=frozenset({layout}),
            heads=HEADS,
            dtypes=frozenset({torch.bfloat16}),
            first=Where(sm=sms, heads=frozenset(range(33, 129)), min_rows=least),
            takes=frozenset({"q_rope"}),
        )
        for name, layout, sms, least, room in (
            ("cuda_portable", "bf16_1152", NO_VENDOR_SMS, SOME_ROWS, "99 KiB of shared memory"),
            (
                "cuda_portable_fp8",
                "fp8_656",
                NO_VENDOR_SMS & LARGE_SHARED_SMS,
                MANY_ROWS,
                "163 KiB of shared memory, with less the Triton kernel",
            ),
        )
    ),
    *(
        _cuda_row(
            operator,
            "select",
            operator,
            CLUSTER_SMS,
            "a cluster of blocks a row, one block if rows are many, run on SM 9.0; what it cannot read goes to Triton",
            max_k=INDEX_MAX_K,
            first=Where(sm=frozenset({90})),
        )
        for operator in ("topk", "topk_slots", "topk_ragged")
    ),
]

_NUMBA_ROWS = [
    _numba_row("index_keys_store", "index_keys", "store_keys"),
    # One thread: with more rows or heads the products of torch, on all threads, win.
    _numba_row(
        "sparse_mla",
        "sparse_mla",
        "sparse_mla",
        first=Where(heads=frozenset(range(1, 33)), below_rows=SOME_ROWS),
        takes=frozenset({"q_rope"}),
    ),
]


# Kernels first: torch is what remains for other devices, dtypes and sizes.
_ROWS: list[Implementation] = [*VENDOR_ROWS, *_CUDA_ROWS, *_TRITON_ROWS, *_NUMBA_ROWS, *_TORCH_ROWS]


def rows(operator: str | None = None) -> tuple[Implementation, ...]:
    """The table, or the rows of one operator, in order of preference."""
    return tuple(r for r in _ROWS if operator is None or r.operator == operator)


def register(implementation: Implementation, *, before: str | None = None) -> None:
    """Add a row: at the end of its operator's list, or ahead of the row named `before`.

    Registering the same (operator, name) again replaces the row, so a plugin loaded twice changes nothing.
    """
    key = (implementation.operator, implementation.name)
    _ROWS[:] = [r for r in _ROWS if (r.operator, r.name) != key]
    at = next(
        (i for i, r in enumerate(_ROWS) if r.operator == implementation.operator and r.name == before), len(_ROWS)
    )
    _ROWS.insert(at, implementation)
    _choose.cache_clear()
    _measured.cache_clear()


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

    `impl` forces a row by name. Raises ValueError when the operator is unknown, when a forced row does not exist or
    cannot run here (with its reason), or when no row can.
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
        known = ", ".join(sorted({r.operator for r in _ROWS}))
        raise ValueError(f"unknown operator {operator!r}; known: {known}")
    if impl is not None:
        named = [r for r in candidates if r.name == impl]
        if not named:
            raise ValueError(
                f"{operator}: impl={impl!r} does not exist; it has {', '.join(r.name for r in candidates)}"
            )
        candidates = tuple(named)
    rejected: dict[str, str] = {}
    for row in candidates:
        if impl is None and row.by_name_only:
            continue
        why = row.why_not(asked, named=impl is not None)
        if why is None:
            where = asked.device if asked.device != "cuda" else f"cuda {sm_name(asked.sm)}"
            reason = f"asked for by name on {where}" if impl else f"first of the table that serves {where}"
            if rejected:
                reason += "; passed over: " + "; ".join(f"{n} ({w})" for n, w in rejected.items())
            return Choice(row, reason, rejected)
        rejected[row.name] = why
    what = f"impl={impl!r} cannot run here" if impl else "no implementation can run here"
    raise ValueError(f"{operator}: {what}: " + "; ".join(f"{n}: {w}" for n, w in rejected.items()))


@functools.cache
def _device_sm(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor
