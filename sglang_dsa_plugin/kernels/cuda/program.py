"""CUDA C++ kernels of this package: compiled by NVRTC for the GPU at hand, kept on disk, launched on torch's stream.

    run = program.kernel("select.cu", "select_rows", device, {"THREADS": 1024})
    run.launch(grid, block, (tensor.data_ptr(), ctypes.c_int(k)), cluster=8)

No CUDA toolkit is needed and no header of one: NVRTC comes with torch, and the package cuda-core calls it. A source
file includes none but this folder's. What is compiled is cached in the process and, as a cubin, in the user's cache
folder, under a name that covers all it depends on; where that folder cannot be written, every process compiles for
itself. The first launch loads the kernel, so it has to be an eager one before a CUDA graph is captured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import io
import os
import re
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_FOLDER = Path(__file__).parent
_STANDARD = "c++17"
_SHARED_UNASKED = 48 * 1024  # a kernel may have as much shared memory without asking
_CLUSTER_UNASKED = 8
_LEGACY_STREAM = 1  # CUDA's name for the stream that torch calls 0
_DIGEST = hashlib.sha256().digest_size
_IMPORTING = threading.Lock()

Defines = Mapping[str, int | str]
Size = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Resources:
    """What ptxas says a kernel takes: registers a thread, bytes of static shared memory, of stack and of spills."""

    registers: int
    shared: int
    stack: int
    spilled: int


def arch_of(sm: int) -> str:
    """The compiler's name of a capability (10 * major + minor): with what only that chip can, where there is such."""
    return f"sm_{sm}a" if sm >= 90 else f"sm_{sm}"


def compile_only(source: str, arch: str, defines: Defines | None = None) -> tuple[bytes, dict[str, Resources]]:
    """(cubin, resources by kernel) of a file of this folder, without a GPU. RuntimeError holds the compiler's log."""
    log = io.StringIO()
    cubin = _compile(source, arch, _items(defines), log, ("-v",))
    return cubin, _resources(log.getvalue())


def kernel(
    source: str,
    name: str,
    device: torch.device,
    defines: Defines | None = None,
    *,
    shared_bytes: int = 0,
) -> Kernel:
    """The kernel `name` (declared extern "C") of a file of this folder on a CUDA device, from a cache after the first
    call.

    defines: macros. shared_bytes: dynamic shared memory of a block.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _kernel(source, name, index, _items(defines), shared_bytes)


def make_current(index: int) -> None:
    """Give this thread the context of a CUDA device in which torch has done something."""
    _cuda_core().Device(index).set_current()


class Kernel:
    """One kernel on one device."""

    def __init__(self, found: Any, index: int, shared_bytes: int) -> None:
        self._kernel, self._index, self._shared_bytes = found, index, shared_bytes
        self._configs: dict[tuple[Size, Size, int, bool], Any] = {}
        self._streams: dict[int, Any] = {}
        self._at_once: dict[tuple[Size, int], int] = {}
        if shared_bytes > _SHARED_UNASKED:
            self._allow("MAX_DYNAMIC_SHARED_SIZE_BYTES", shared_bytes)

    def launch(self, grid: Size, block: Size, args: Sequence[Any], *, cluster: int = 1, pdl: bool = False) -> None:
        """Launch on torch's current stream of the kernel's device.

        grid: in clusters, where `cluster` (blocks of one, along x) is above 1, else in blocks. args: addresses as int,
        numbers as ctypes or numpy scalars of the parameter's type. pdl: may start before the kernel ahead of it in the
        stream is done; it has to wait for that one itself (wait_for_earlier of cluster.cuh).
        """
        launch = _cuda_core().launch
        config = self._configs.get((grid, block, cluster, pdl))
        if config is None:
            config = self._new_config(grid, block, cluster, pdl)
        address = torch.cuda.current_stream(self._index).cuda_stream
        stream = self._streams.get(address)
        if stream is None:
            stream = self._new_stream(address)
        if self._index == torch.cuda.current_device():
            launch(stream, config, self._kernel, *args)
        else:
            with torch.cuda.device(self._index):
                launch(stream, config, self._kernel, *args)

    def clusters_at_once(self, block: Size, cluster: int) -> int:
        """How many clusters of so many blocks the device holds at a time: a cluster needs neighbours that are free."""
        found = self._at_once.get((block, cluster))
        if found is None:
            config = self._new_config(cluster, block, cluster, False)
            stream = self._new_stream(torch.cuda.current_stream(self._index).cuda_stream)
            with torch.cuda.device(self._index):
                found = self._kernel.occupancy.max_active_clusters(config, stream=stream)
            self._at_once[block, cluster] = found
        return found

    def _new_config(self, grid: Size, block: Size, cluster: int, pdl: bool) -> Any:
        options: dict[str, Any] = {"grid": grid, "block": block, "shmem_size": self._shared_bytes}
        if cluster > 1:
            options["cluster"] = cluster
        if cluster > _CLUSTER_UNASKED:
            self._allow("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        if pdl:
            options["programmatic_stream_serialization"] = True
        with torch.cuda.device(self._index):
            config = _cuda_core().LaunchConfig(**options)
        if len(self._configs) >= 1024:
            self._configs.clear()
        self._configs[grid, block, cluster, pdl] = config
        return config

    def _new_stream(self, address: int) -> Any:
        if len(self._streams) >= 64:
            self._streams.clear()
        stream = self._streams[address] = _cuda_core().Stream.from_handle(address or _LEGACY_STREAM)
        return stream

    def _allow(self, attribute: str, value: int) -> None:
        from cuda.bindings import driver

        name = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
        (error,) = driver.cuKernelSetAttribute(
            name, value, driver.CUkernel(int(self._kernel.handle)), driver.CUdevice(self._index)
        )
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuKernelSetAttribute({attribute}, {value}): {error.name}")


@functools.cache
def _kernel(source: str, name: str, index: int, defines: tuple[tuple[str, str], ...], shared_bytes: int) -> Kernel:
    with torch.cuda.device(index):
        return Kernel(_module(source, index, defines).get_kernel(name), index, shared_bytes)


@functools.cache
def _module(source: str, index: int, defines: tuple[tuple[str, str], ...]) -> Any:
    major, minor = torch.cuda.get_device_capability(index)
    torch.zeros(1, device=f"cuda:{index}")  # torch's context, if it has none yet
    make_current(index)
    return _cuda_core().ObjectCode.from_cubin(_cubin(source, arch_of(10 * major + minor), defines), name=source)


def _cubin(source: str, arch: str, defines: tuple[tuple[str, str], ...]) -> bytes:
    """From the cache folder, or compiled and put there. A file begins with the digest of the rest: one that was cut
    short is made again.
    """
    what = (_text(source), arch, defines, _STANDARD, _compiler())
    path = _cache_folder()
    if path is None:
        return _compile(source, arch, defines)
    path /= f"{Path(source).stem}-{arch}-{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}.cubin"
    with contextlib.suppress(OSError):
        kept = path.read_bytes()
        if kept[:_DIGEST] == hashlib.sha256(kept[_DIGEST:]).digest():
            return kept[_DIGEST:]
    cubin = _compile(source, arch, defines)
    written = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            written = file.name
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(written, path)  # whole or not at all, whoever else writes it
    except OSError:
        if written is not None:
            with contextlib.suppress(OSError):
                os.unlink(written)
    return cubin


def _cache_folder() -> Path | None:
    """The user's, or None where there is none."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang_dsa_plugin" / "cubins"
    except RuntimeError:
        return None


def _compile(
    source: str,
    arch: str,
    defines: tuple[tuple[str, str], ...],
    log: io.StringIO | None = None,
    ptxas: tuple[str, ...] = (),
) -> bytes:
    core = _cuda_core()
    options = core.ProgramOptions(
        name=source,
        arch=arch,
        std=_STANDARD,
        define_macro=list(defines) or None,
        ptxas_options=list(ptxas) or None,
    )
    try:
        return bytes(core.Program(_text(source), "c++", options).compile("cubin", logs=log).code)
    except Exception as error:
        raise RuntimeError(f"{source} does not compile for {arch}: {error}") from error


def _text(source: str) -> str:
    """The file with the files of this folder that it includes put in their place: a cubin depends on all of them."""
    return re.sub(r'(?m)^#include "([\w.]+)"$', lambda found: _text(found[1]), _FOLDER.joinpath(source).read_text())


@functools.cache
def _compiler() -> tuple[int, int, str, str]:
    """What else a cubin depends on: NVRTC, as it numbers itself and as it was installed, and cuda.core."""
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"nvrtcVersion: {error.name}")
    build = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        build = importlib.metadata.version("nvidia-cuda-nvrtc")
    return major, minor, build, str(_cuda_core().__version__)


def _cuda_core() -> Any:
    """The module. It changes its own contents while it is imported, which a second thread must not see."""
    with _IMPORTING:
        return importlib.import_module("cuda.core")


def _items(defines: Defines | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, str(value)) for name, value in defines.items())) if defines else ()


def _resources(log: str) -> dict[str, Resources]:
    """By kernel, from the report of ptxas -v."""
    found = {}
    for name, text in re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", log, re.S):
        numbers = (
            re.search(pattern, text)
            for pattern in (r"Used (\d+) registers", r"(\d+) bytes smem", r"(\d+) bytes stack", r"(\d+) bytes spill st")
        )
        found[name] = Resources(*(int(n[1]) if n else 0 for n in numbers))
    return found
