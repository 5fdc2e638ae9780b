"""What a row of the support table is: one way to run one operator, what it can do, and where it is worth taking."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

# From here on a call is a prefill in the eyes of kernels that do not split one row over the GPU.
MANY_ROWS = 256
# Below it a call is a decode step of a few requests; on a CPU it runs on one thread (adapter/cpu_threads.py).
SOME_ROWS = 16
# From here on the rows of a decode step fill a GPU without being split much.
MORE_ROWS = 64
# Numbers of query rows that choices may depend on; those in between count as the one below. Where a few rows share the
# GPU one more changes what each has of it, so there they double.
ROW_STEPS = (0, 2, 4, 8, SOME_ROWS, MORE_ROWS, MANY_ROWS)
# What this package's Triton kernels take.
TRITON_SMS = frozenset({80, 86, 87, 89, 90, 100, 103, 120, 121})
# Capabilities with clusters of blocks, which a CUDA C++ kernel may need.
CLUSTER_SMS = frozenset({90, 100, 103, 120, 121})
# Where no vendor's kernel of sparse attention is to be had, or only for some models.
NO_VENDOR_SMS = frozenset({80, 86, 87, 89, 120, 121})
# Names of the rows that run this package's own kernels on a GPU.
OURS = frozenset({"cuda", "cuda_portable", "cuda_portable_fp8", "triton"})
HEADS = frozenset(range(1, 129))
INDEX_MAX_K = 4096


class NotServed(ValueError):
    """Nothing can do here what is asked of an operator, or not what was named; the message says why not. An operator or
    a name that there is not is a plain ValueError: the caller is wrong, and not the machine.
    """


@dataclass(frozen=True)
class Request:
    """What is asked of an operator; None where it does not matter or is not known yet.

    rows: query rows, one of ROW_STEPS; of index_select_paged those of a request on average. packages: kernel packages
    to reckon with: those "installed" here, "all" of them, or "none". planned: whether it is handed what it needs of a
    step, made once for all layers (index_select_paged); rows are those of the step then.
    """

    device: str
    sm: int | None = None
    layout: str | None = None
    heads: int | None = None
    k: int | None = None
    dtype: torch.dtype | None = None
    rows: int | None = None
    packages: str = "installed"
    planned: bool = False


@dataclass(frozen=True)
class Where:
    """Where an implementation is taken unasked: compute capabilities and head counts (None: any), and query rows from
    min_rows on and below below_rows (None: any number), both of ROW_STEPS.
    """

    sm: frozenset[int] | None = None
    heads: frozenset[int] | None = None
    min_rows: int = 0
    below_rows: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("min_rows", self.min_rows), ("below_rows", self.below_rows)):
            if value is not None and value not in ROW_STEPS:
                raise ValueError(f"{name} must be one of {', '.join(map(str, ROW_STEPS))}, got {value}")

    def words(self) -> str:
        """The same for a table."""
        found = [f"SM {_sm_list(self.sm)}"] if self.sm else []
        found += [f"{_ranges(self.heads)} heads"] if self.heads else []
        found += [f"{self.min_rows} rows or more"] if self.min_rows else []
        found += [f"fewer than {self.below_rows} rows"] if self.below_rows is not None else []
        return ", ".join(found) or "everywhere"

    def why_not(self, asked: Request) -> str | None:
        """The first reason why the request is not one of these, or None when it is."""
        if self.sm is not None and asked.sm is not None and asked.sm not in self.sm:
            return f"measured on SM {_sm_list(self.sm)} only, elsewhere taken by name"
        if self.heads is not None and asked.heads is not None and asked.heads not in self.heads:
            return f"worth it for {_ranges(self.heads)} heads"
        if asked.rows is not None and asked.rows < self.min_rows:
            return f"worth it from {self.min_rows} rows on"
        if asked.rows is not None and self.below_rows is not None and asked.rows >= self.below_rows:
            return f"worth it below {self.below_rows} rows"
        return None


@dataclass(frozen=True)
class Implementation:
    """One way to run one operator.

    operator: name as in docs/operators.md, for example "sparse_mla".
    name: what `impl=` accepts, for example "torch".
    target: "module:function", imported at first use so that a missing kernel package costs nothing elsewhere; or the
        callable itself.
    devices: torch device types.
    sm: compute capabilities as 10 * major + minor; None when any will do.
    layouts, heads: accepted values; None when any will do.
    max_k: largest number of picks; None when unbounded.
    ks: numbers of picks it takes, where it does not take all up to max_k.
    dtypes: of q; None when any will do.
    package: module of the kernel package it needs, or of each of them.
    first: where it is taken unasked; None is everywhere.
    arguments: keywords for the target, where one function serves several rows.
    exact: whether its result is held to the operator's bound (docs/operators.md); a few of other packages cannot be.
    capturable: a CUDA graph may record it: it reads no values on the host, and its shapes follow from its arguments'.
    takes: optional arguments of the operator that it knows itself; the operator makes up for those that it does not.
    plans: as target, what it makes once a step for all layers; None where there is nothing to make.
    planned: where it is taken unasked by a step that makes it; None is as `first`.
    note: why the row exists or where it stops, for docs/support.md.
    """

    operator: str
    name: str
    target: str | Callable[..., Any]
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    sm: frozenset[int] | None = None
    layouts: frozenset[str] | None = None
    heads: frozenset[int] | None = None
    max_k: int | None = None
    ks: frozenset[int] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    package: str | tuple[str, ...] | None = None
    first: Where | None = None
    arguments: tuple[tuple[str, Any], ...] = ()
    exact: bool = True
    capturable: bool = False
    takes: frozenset[str] = frozenset()
    plans: str | None = None
    planned: Where | None = None
    note: str = ""

    @property
    def by_name_only(self) -> bool:
        """Whether it is never taken unasked."""
        return self.first is not None and self.first.sm is not None and not self.first.sm

    def why_not(self, asked: Request, named: bool = False) -> str | None:
        """The first reason why this row does not serve the request, or None when it does. named: asked for by name, so
        that it need not be worth it.
        """
        device, sm, layout, heads, k = asked.device, asked.sm, asked.layout, asked.heads, asked.k
        if device not in self.devices:
            return f"runs on {'/'.join(sorted(self.devices))}, not on {device}"
        if self.sm is not None and device == "cuda" and sm not in self.sm:
            return f"built for SM {_sm_list(self.sm)}, this GPU is {sm_name(sm)}"
        if self.layouts is not None and layout is not None and layout not in self.layouts:
            return f"reads {'/'.join(sorted(self.layouts))}, not {layout}"
        if self.heads is not None and heads is not None and heads not in self.heads:
            return f"takes {_ranges(self.heads)} heads, not {heads}"
        if self.max_k is not None and k is not None and k > self.max_k:
            return f"takes k up to {self.max_k}, not {k}"
        if self.ks is not None and k is not None and k not in self.ks:
            return f"takes k = {_ranges(self.ks)}, not {k}"
        if self.dtypes is not None and asked.dtype is not None and asked.dtype not in self.dtypes:
            names = "/".join(sorted(str(d).removeprefix("torch.") for d in self.dtypes))
            return f"takes {names}, not {str(asked.dtype).removeprefix('torch.')}"
        first = self.first
        if asked.planned and self.planned is not None:
            first = self.planned
        elif asked.planned:  # `first` counts the rows of a request, of which a step that is planned has one
            asked = replace(asked, rows=0)
        if not named and first is not None and (why := first.why_not(asked)) is not None:
            return why
        return next(filter(None, (_missing(package, asked.packages) for package in self.packages)), None)

    @property
    def packages(self) -> tuple[str, ...]:
        """The kernel packages it needs."""
        return (self.package,) if isinstance(self.package, str) else self.package or ()

    def sm_words(self) -> str:
        """Compute capabilities for a table."""
        if self.devices == {"cpu"}:
            return "CPU"
        return "any" if self.sm is None else _sm_list(self.sm)

    def limits(self) -> str:
        """Layouts, head counts and numbers of picks for a table."""
        found = ["/".join(sorted(self.layouts))] if self.layouts else []
        found += [f"{_ranges(self.heads)} heads"] if self.heads else []
        found += [f"k = {_ranges(self.ks)}"] if self.ks else [f"k up to {self.max_k}"] if self.max_k else []
        return ", ".join(found)

    def load(self) -> Callable[..., Any]:
        """Import and return the callable; ImportError names the operator and implementation."""
        if callable(self.target):
            return self.target
        return self._loaded(self.target)

    def load_plan(self) -> Callable[..., Any] | None:
        """The same of what it makes once a step."""
        return None if self.plans is None else self._loaded(self.plans)

    def _loaded(self, target: str) -> Callable[..., Any]:
        found = _import_target(target, self.arguments)
        return on_its_device(found) if self.devices == {"cuda"} else found


@functools.cache
def _import_target(target: str, arguments: tuple[tuple[str, Any], ...] = ()) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name)
    return functools.partial(found, **dict(arguments)) if arguments else found


@functools.cache
def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels are launched on the current device, which need not be that of the first argument, a tensor."""

    @functools.wraps(function)
    def run(first: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if first.device.type != "cuda" or first.device.index == torch.cuda.current_device():
            return function(first, *arguments, **options)
        with torch.cuda.device(first.device):
            return function(first, *arguments, **options)

    return run


def _missing(package: str, packages: str) -> str | None:
    """Why a kernel package cannot be reckoned with, in words, or None; packages: see Request."""
    if packages == "all":
        return None
    return f"{package} is not installed" if packages == "none" else unusable(package)


@functools.cache
def unusable(package: str) -> str | None:
    """Why a kernel package cannot be used on this machine, in words, or None where it can."""
    # Looking for a module inside a package imports the package, which may not be there.
    if any(importlib.util.find_spec(part) is None for part in itertools.accumulate(package.split("."), "{}.{}".format)):
        return f"{package} is not installed{_REMEDIES.get(package, '')}"
    why = _CONDITIONS[package]() if package in _CONDITIONS else None
    return f"{package} {why}" if why else None


def _why_deep_gemm_cannot_compile() -> str | None:
    if not torch.cuda.is_available():
        return None
    if os.environ.get("SGLANG_ENABLE_JIT_DEEPGEMM", "1").strip().lower() in ("0", "false", "no"):
        return "is switched off by SGLANG_ENABLE_JIT_DEEPGEMM"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if not os.path.isdir(home) and shutil.which("nvcc") is None:
        return f"compiles at its first call, and there is no CUDA toolkit: no {home} and no nvcc on PATH"
    return None


def _why_nvrtc_cannot_serve() -> str | None:
    """NVRTC has to be there, to know the GPUs of this machine, and not to be too new for their driver."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        status, major, _ = nvrtc.nvrtcVersion()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return f"finds no NVRTC to compile with: {status.name}"
        if not torch.cuda.is_available():
            return None
        known = nvrtc.nvrtcGetSupportedArchs()[1]
        driver = importlib.import_module("cuda.bindings.driver").cuDriverGetVersion()[1]
    except (ImportError, RuntimeError, OSError) as error:
        return f"finds no NVRTC to compile with: {error}"
    for index in range(torch.cuda.device_count()):
        one, two = torch.cuda.get_device_capability(index)
        if 10 * one + two not in known:
            return f"has an NVRTC ({major}) that does not know {sm_name(10 * one + two)}"
    if driver // 1000 < major:
        return f"has an NVRTC ({major}) that is newer than the driver (CUDA {driver // 1000}.{driver % 1000 // 10})"
    return None


# What has to be true besides being installed: module -> why it is not, in words that follow the name, or None. DeepGEMM
# comes with SGLang, whether it can compile or not.
_CONDITIONS: dict[str, Callable[[], str | None]] = {
    "deep_gemm": _why_deep_gemm_cannot_compile,
    "cuda.core": _why_nvrtc_cannot_serve,
}
_REMEDIES = {"cuda.core": " (pip install cuda-core)"}


def sm_name(sm: int | None) -> str:
    return "SM unknown" if sm is None else f"SM {sm // 10}.{sm % 10}"


def _ranges(numbers: frozenset[int]) -> str:
    """64/128 for few numbers, 1-128 for all in between."""
    low, high = min(numbers), max(numbers)
    whole = len(numbers) == high - low + 1 and len(numbers) > 2
    return f"{low}-{high}" if whole else "/".join(map(str, sorted(numbers)))


def _sm_list(sms: frozenset[int]) -> str:
    return ", ".join(f"{s // 10}.{s % 10}" for s in sorted(sms))
