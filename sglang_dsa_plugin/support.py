"""The support table: which implementation of which operator runs where, and why.

One row per (operator, implementation). `choose()` walks the rows of an operator in order of preference and returns
the first whose features cover the request, together with the reason in words and why each earlier row was passed
over. Operators, the doctor, the docs and the tests all read this table; nothing else decides.

Features of a row: device types, SM list (CUDA only; None is any), layouts, head counts and a cap on k (None is any).
Kernels that live only inside sglang join through `register()`; they are never imported here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

_TORCH = "sglang_dsa_plugin.kernels.torch_impl"
_TRITON = "sglang_dsa_plugin.kernels.triton"


# From here on a call is a prefill in the eyes of kernels that do not split one row over the GPU.
MANY_ROWS = 256


@dataclass(frozen=True)
class Request:
    """What is asked of an operator; None where it does not matter or is not known yet.

    packages: kernel packages to reckon with: those "installed" here, "all" of them, or "none".
    """

    device: str
    sm: int | None = None
    layout: str | None = None
    heads: int | None = None
    k: int | None = None
    dtype: torch.dtype | None = None
    many_rows: bool | None = None
    packages: str = "installed"


@dataclass(frozen=True)
class Implementation:
    """One way to run one operator.

    operator: name as in docs/operators.md, for example "sparse_mla".
    name: what `impl=` accepts, for example "torch".
    target: "module:function", imported at first use so that a missing kernel package costs nothing elsewhere;
        or the callable itself when injected by `register()`.
    devices: torch device types.
    sm: compute capabilities as 10 * major + minor; None when any will do.
    layouts, heads: accepted values; None when any will do.
    max_k: largest number of picks; None when unbounded.
    dtypes: of q; None when any will do.
    package: module of the kernel package it needs.
    many_rows: only worth it, and only offered, from MANY_ROWS query rows on (a prefill).
    capturable: a CUDA graph may record it: it reads no values on the host, and its shapes follow from its arguments'.
    note: why the row exists or where it stops, shown by the doctor.
    """

    operator: str
    name: str
    target: str | Callable[..., Any]
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    sm: frozenset[int] | None = None
    layouts: frozenset[str] | None = None
    heads: frozenset[int] | None = None
    max_k: int | None = None
    dtypes: frozenset[torch.dtype] | None = None
    package: str | None = None
    many_rows: bool = False
    capturable: bool = False
    note: str = ""

    def why_not(self, asked: Request) -> str | None:
        """The first reason why this row cannot serve the request, or None when it can."""
        device, sm, layout, heads, k = asked.device, asked.sm, asked.layout, asked.heads, asked.k
        if device not in self.devices:
            return f"runs on {'/'.join(sorted(self.devices))}, not on {device}"
        if self.sm is not None and device == "cuda" and sm not in self.sm:
            return f"built for SM {_sm_list(self.sm)}, this GPU is {_sm_name(sm)}"
        if self.layouts is not None and layout is not None and layout not in self.layouts:
            return f"reads {'/'.join(sorted(self.layouts))}, not {layout}"
        if self.heads is not None and heads is not None and heads not in self.heads:
            return f"takes {_ranges(self.heads)} heads, not {heads}"
        if self.max_k is not None and k is not None and k > self.max_k:
            return f"takes k up to {self.max_k}, not {k}"
        if self.dtypes is not None and asked.dtype is not None and asked.dtype not in self.dtypes:
            names = "/".join(sorted(str(d).removeprefix("torch.") for d in self.dtypes))
            return f"takes {names}, not {str(asked.dtype).removeprefix('torch.')}"
        if self.many_rows and asked.many_rows is False:
            return f"worth it from {MANY_ROWS} rows on"
        if self.package is not None and not _there(self.package, asked.packages):
            return f"{self.package} is not installed"
        return None

    def load(self) -> Callable[..., Any]:
        """Import and return the callable; ImportError names the operator and implementation."""
        if callable(self.target):
            return self.target
        found = _import_target(self.target)
        return _on_its_device(found) if self.devices == {"cuda"} else found


@dataclass(frozen=True)
class Choice:
    """What was chosen, why, and what was passed over (name -> reason)."""

    implementation: Implementation
    reason: str
    rejected: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.implementation.name


def _torch_row(operator: str, module: str, function: str) -> Implementation:
    return Implementation(
        operator, "torch", f"{_TORCH}.{module}:{function}", note="vectorised torch, memory bounded by tiles; any device"
    )


_TRITON_SMS = frozenset({80, 86, 87, 89, 90, 100, 103, 120, 121})


def _triton_row(operator: str, module: str, function: str, also: str = "", **features: Any) -> Implementation:
    return Implementation(
        operator,
        "triton",
        f"{_TRITON}.{module}:{function}",
        devices=frozenset({"cuda"}),
        sm=_TRITON_SMS,
        capturable=True,
        note=f"Triton{also}; run on SM 9.0, compiled for 8.0, 8.6, 8.9, 10.0 and 12.0",
        **features,
    )


_HEADS = frozenset(range(1, 129))
_INDEX_MAX_K = 4096

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
    _torch_row("latent_rows_store", "latent_rows", "store"),
    _torch_row("latent_rows_load", "latent_rows", "load"),
    _torch_row("latent_rows_move", "latent_rows", "move"),
]

_TRITON_ROWS = [
    _triton_row("index_scores_ragged", "index_scores", "ragged", heads=_HEADS),
    _triton_row("index_scores_paged", "index_scores", "paged", heads=_HEADS),
    _triton_row("topk", "select", "topk", max_k=_INDEX_MAX_K),
    _triton_row("topk_slots", "select", "topk_slots", max_k=_INDEX_MAX_K),
    _triton_row("topk_ragged", "select", "topk_ragged", max_k=_INDEX_MAX_K),
    _triton_row("positions_to_slots", "select", "positions_to_slots"),
    _triton_row("index_keys_store", "index_front", "store_keys"),
    _triton_row("index_queries", "index_front", "prepare_queries"),
    _triton_row("latent_rows_store", "latent_rows", "store"),
    _triton_row("index_select_ragged", "index_select", "ragged", heads=_HEADS, max_k=_INDEX_MAX_K),
    _triton_row("index_select_paged", "index_select", "paged", heads=_HEADS, max_k=_INDEX_MAX_K),
    _triton_row(
        "sparse_mla",
        "sparse_mla",
        "sparse_mla",
        also=", on SM 9.0 Gluon up to 32 heads",
        layouts=frozenset({"bf16_1152", "fp8_656", "fp8_576"}),
        heads=_HEADS,
    ),
]

_VENDOR = "sglang_dsa_plugin.kernels.vendor"
_BF16 = frozenset({torch.bfloat16})

_VENDOR_ROWS = [
    Implementation(
        "sparse_mla",
        "flash_mla",
        f"{_VENDOR}.flash_mla:sparse_mla",
        devices=frozenset({"cuda"}),
        sm=frozenset({90}),
        layouts=frozenset({"bf16_1152"}),
        heads=frozenset(range(49, 129)),
        dtypes=_BF16,
        package="flash_mla",
        many_rows=True,
        capturable=True,
        note="FlashMLA sparse prefill, which computes 64 or 128 heads; ours computes fewer without padding",
    ),
    Implementation(
        "dense_mha",
        "fa3",
        f"{_VENDOR}.fa3:dense_mha",
        devices=frozenset({"cuda"}),
        sm=frozenset({90}),
        dtypes=_BF16,
        package="sgl_kernel",
        note="FlashAttention 3 as sgl-kernel builds it; on SM 8.x it takes no values narrower than keys",
    ),
]

# Kernels first: torch is what remains for other devices, dtypes and sizes.
_ROWS: list[Implementation] = [*_VENDOR_ROWS, *_TRITON_ROWS, *_TORCH_ROWS]


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
) -> Choice:
    """Pick the implementation of `operator` for this device and these features (dtype: of q; rows: query rows;
    packages: see Request).

    `impl` forces a row by name. Raises ValueError when the operator is unknown, when a forced row does not exist or
    cannot run here (with its reason), or when no row can.
    """
    kind = device if isinstance(device, str) else device.type
    kind = kind.split(":")[0]
    if kind == "cuda" and sm is None:
        sm = _device_sm(torch.device(device).index or 0)
    many = None if rows is None else rows >= MANY_ROWS
    return _choose(operator, impl, Request(kind, sm, layout, heads, k, dtype, many, packages))


def resolve(
    operator: str, *, device: torch.device | str, impl: str | None = None, **features: Any
) -> Callable[..., Any]:
    """`choose(...)` and load: the callable to run."""
    return choose(operator, device=device, impl=impl, **features).implementation.load()


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
        asked = replace(asked, many_rows=None)  # a matter of speed, not of what can run
    rejected: dict[str, str] = {}
    for row in candidates:
        why = row.why_not(asked)
        if why is None:
            where = asked.device if asked.device != "cuda" else f"cuda {_sm_name(asked.sm)}"
            reason = f"asked for by name on {where}" if impl else f"first of the table that serves {where}"
            if rejected:
                reason += "; passed over: " + "; ".join(f"{n} ({w})" for n, w in rejected.items())
            return Choice(row, reason, rejected)
        rejected[row.name] = why
    what = f"impl={impl!r} cannot run here" if impl else "no implementation can run here"
    raise ValueError(f"{operator}: {what}: " + "; ".join(f"{n}: {w}" for n, w in rejected.items()))


@functools.cache
def _import_target(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels are launched on the current device, which need not be that of the first argument, a tensor."""

    @functools.wraps(function)
    def run(first: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if first.device.type != "cuda" or first.device.index == torch.cuda.current_device():
            return function(first, *arguments, **options)
        with torch.cuda.device(first.device):
            return function(first, *arguments, **options)

    return run


def _there(package: str, packages: str) -> bool:
    return packages == "all" or (packages == "installed" and _installed(package))


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def _device_sm(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def _sm_name(sm: int | None) -> str:
    return "SM unknown" if sm is None else f"SM {sm // 10}.{sm % 10}"


def _ranges(numbers: frozenset[int]) -> str:
    """64/128 for few numbers, 1-128 for all in between."""
    low, high = min(numbers), max(numbers)
    whole = len(numbers) == high - low + 1 and len(numbers) > 2
    return f"{low}-{high}" if whole else "/".join(map(str, sorted(numbers)))


def _sm_list(sms: frozenset[int]) -> str:
    return ", ".join(f"{s // 10}.{s % 10}" for s in sorted(sms))
