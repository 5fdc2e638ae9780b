"""Sparse MLA in CUDA C++ for Hopper: what `sparse_mla.cu` and `sparse_mla_fp8.cu` are compiled and launched with.

No host synchronisation, and between calls no state but maps of rows, which say where rows lie (tensor_maps.py). So a
call can be captured in a CUDA graph once the kernel is loaded.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable

import torch

from sglang_dsa_plugin.kernels.cuda import program, tensor_maps
from sglang_dsa_plugin.kernels.cuda.sparse_mla_operands import Operands, rows_on_bounds
from sglang_dsa_plugin.kernels.triton import index_tables
from sglang_dsa_plugin.kernels.triton.sparse_mla import sparse_mla as triton_sparse_mla

# What the sources take for granted, too.
_HEADS = 16
_TILE = 64
_THREADS = 384
_LOG2E = 1 / math.log(2)
MOST_BLOCKS = 8  # of a cluster, where nothing is asked of the GPU
_SPLIT_PICKS = 1024  # from which on a second launch costs less than what it saves
# Whether hand-overs have the form that racecheck follows (sparse_mla_parts.cuh) where it costs time, too.
LANES_ARRIVE = False


@dataclasses.dataclass(frozen=True)
class Form:
    """The kernel of one layout. row_bytes: of a cache row; stages: tiles in the ring; slots: its places; tensor_copies:
    whether the tensor unit copies rows, where blocks share none; own_maxima: whether every warp of scores has a maximum
    of its own, where blocks share no row and have up to 8 heads, or more rows to walk over than there are blocks.
    Elsewhere they were slower.
    """

    source: str
    name: str
    row_bytes: int
    stages: int
    slots: int
    tensor_copies: bool = False
    own_maxima: bool = False

    def defines(
        self,
        cluster: int,
        *,
        lengths: bool,
        sink: bool,
        wide_slots: bool,
        heads: int = _HEADS,
        tensor_copies: bool = True,
        walks: bool = True,
    ) -> dict[str, int]:
        """Macros. wide_slots: int64. The form for up to 8 heads was measured for blocks that share no row.
        tensor_copies: whether the tensor unit can copy these rows. walks: whether there are more rows than blocks.
        """
        return {
            "CLUSTER": cluster,
            "STAGES": self.stages,
            "HEADS": 8 if cluster == 1 and heads <= 8 else _HEADS,
            "HAS_LENGTHS": int(lengths),
            "HAS_SINK": int(sink),
            "SLOTS64": int(wide_slots),
            "LANES_ARRIVE": int(LANES_ARRIVE or cluster > 1),
            "READERS_FENCE": int(LANES_ARRIVE),
            "TENSOR_COPIES": int(self.maps(cluster, tensor_copies)),
            "OWN_MAXIMA": int(self.own_maxima and cluster == 1 and (walks or heads <= 8)),
        }

    def maps(self, cluster: int, can: bool) -> bool:
        """Whether it is handed a map of the rows, by which the tensor unit copies them. can: whether that can."""
        return self.tensor_copies and can and cluster == 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as `Shared` of the source divides it."""
        ring = self.stages * _TILE * self.row_bytes + 32 * self.slots  # tiles; of a place its information, two barriers
        turn = _HEADS * (4 * _TILE + 32 + 4 + 16) + 40  # weights, factors, maxima, and up to five barriers
        return ring + 2 * turn + 8 * _HEADS + 16 * _HEADS  # what a row ends and begins with


FORMS = {
    "bf16_1152": Form("sparse_mla.cu", "sparse_mla_bf16", 1152, 3, slots=12, tensor_copies=True, own_maxima=True),
    "fp8_656": Form("sparse_mla_fp8.cu", "sparse_mla_fp8", 656, 4, slots=4),
}


def cluster_of(items: int, processors: int, at_once: Callable[[int], int]) -> int:
    """Blocks that share a row: as many as let all rows run at a time. at_once: how many clusters of a size can.

    It follows from shapes and the GPU only, so results repeat.
    """
    sizes = range(MOST_BLOCKS, 1, -1)
    return next((c for c in sizes if items * c <= processors and items <= at_once(c)), 1)


def launches(
    rows: int, tiles: int, picks: int, processors: int, at_once: Callable[[int], int]
) -> list[tuple[int, int]]:
    """(rows, blocks that share one of them) of each launch; a row has `tiles` times 16 heads. at_once as above.

    Where rows would fill most processors one time less than the rest, the last ones are launched for themselves, and
    shared: 4096 rows are 31 for each of 132 processors, and 4.
    """
    cluster = cluster_of(rows * tiles, processors, at_once)
    whole = rows * tiles // processors * processors // tiles
    last = rows - whole
    if cluster == 1 and whole and last and picks >= _SPLIT_PICKS:
        shared = cluster_of(last * tiles, processors, at_once)
        if shared > 1:
            return [(whole, 1), (last, shared)]
    return [(rows, cluster)]


def sparse_mla(
    q: torch.Tensor,
    kv_rows: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    layout: str,
    kv_scale: float = 1.0,
    sink: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    q_rope: torch.Tensor | None = None,
    cluster: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.sparse_mla.sparse_mla` for bf16 q and the layouts of FORMS. cluster: 1 to 8 instead of `cluster_of`,
    for measurements.
    """
    form = FORMS[layout]
    if not rows_on_bounds(kv_rows):
        return triton_sparse_mla(q, kv_rows, slots, scale, layout, kv_scale, sink, lengths, out, q_rope=q_rope)
    given = Operands.of(q, slots, lengths, out, q_rope)
    (rows, heads, _), picks = q.shape, slots.shape[1]
    if not (rows and heads and picks and kv_rows.shape[0]):
        return given.without_picks()
    nope, rope, slots, lengths = given.nope, given.rope, given.slots, given.lengths
    result, lse, row_stride = given.result, given.lse, kv_rows.stride(0) * kv_rows.element_size()
    written = given.written()
    tiles = -(-heads // _HEADS)
    processors = index_tables.gpu_of(q.device).processors

    asked = {
        "lengths": lengths is not None,
        "sink": sink is not None,
        "wide_slots": slots.dtype == torch.int64,
        "heads": heads,
        "tensor_copies": form.tensor_copies and tensor_maps.describes(kv_rows),
    }

    def kernel(blocks: int, walks: bool = True) -> program.Kernel:
        macros = form.defines(blocks, walks=walks, **asked)
        return program.kernel(form.source, form.name, q.device, macros, shared_bytes=form.shared_bytes)

    if cluster is None:
        # Whatever CLUSTER a kernel is compiled for, it takes as much of a multiprocessor.
        parts = launches(rows, tiles, picks, processors, lambda size: kernel(1).clusters_at_once(_THREADS, size))
    else:
        parts = [(rows, cluster)]
    first = 0

    def at(t: torch.Tensor | None) -> int:
        # By hand: a slice takes the host a microsecond.
        return 0 if t is None else t.data_ptr() + first * t.stride(0) * t.element_size()

    for count, blocks in parts:
        items = count * tiles
        mapped = form.maps(blocks, asked["tensor_copies"])
        kernel(blocks, walks=items > processors).launch(
            min(items, processors) if blocks == 1 else items,
            _THREADS,
            (
                at(nope),
                at(rope),
                kv_rows.data_ptr(),
                at(slots),
                at(lengths),
                0 if sink is None else sink.data_ptr(),
                at(written),
                at(lse),
                ctypes.c_int64(nope.stride(0)),
                ctypes.c_int64(nope.stride(1)),
                ctypes.c_int64(rope.stride(0)),
                ctypes.c_int64(rope.stride(1)),
                ctypes.c_int64(row_stride),
                ctypes.c_int64(slots.stride(0)),
                ctypes.c_int64(written.stride(0)),
                ctypes.c_int64(written.stride(1)),
                ctypes.c_int32(kv_rows.shape[0]),
                ctypes.c_int32(heads),
                ctypes.c_int32(picks),
                ctypes.c_int32(items),
                ctypes.c_float(scale * _LOG2E),
                *([tensor_maps.of_rows(kv_rows)] if mapped else []),
            ),
            cluster=blocks,
            pdl=True,
        )
        first += count
    if written is not result:
        result.copy_(written)
    return result, lse
