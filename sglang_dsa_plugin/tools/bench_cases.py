"""The cases of the kernel benchmark: shapes, inputs, what this package runs, what the built-in runs, and the floor.

Every builder takes its sizes, so that a test runs each case in torch on a CPU against the operator's reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import LATENT_DIM, LATENT_LAYOUTS, PAGE_SIZE, ROPE_DIM
from sglang_dsa_plugin.ops import dense_mha, sparse_mla
from sglang_dsa_plugin.tools import bench_floors as floors
from sglang_dsa_plugin.tools import bench_rivals as rivals
from sglang_dsa_plugin.tools.bench_floors import Work
from sglang_dsa_plugin.tools.bench_inputs import Maker
from sglang_dsa_plugin.tools.bench_rivals import Inputs, Rival
from sglang_dsa_plugin.tools.bench_timing import SLOWER

SHORT = {"bf16_1152": "bf16", "fp8_656": "fp8 656"}
SCALE = 192**-0.5
# Times the vendor's time that a portable kernel may take in decode.
PORTABLE_DECODE = 1 / 0.8


@dataclass(frozen=True)
class Sizes:
    """What the cases are made of: the lengths of the acceptance table, or tiny ones for a test."""

    k: int = 2048
    heads: tuple[int, ...] = (8, 16, 64, 128)
    index_heads: int = 64
    batches: tuple[int, ...] = (1, 16, 64)
    cached: int = 32768
    prefill: int = 4096
    lengths: tuple[int, ...] = (8192, 32768, 131072)
    steps: tuple[int, ...] = (1024, 8192, 32768, 131072)
    context: int = 131072


@dataclass(frozen=True)
class Case:
    """One line of the table.

    panel, line, tokens: cases that differ in tokens only are one line of a plot.  set_bytes: what one call touches, by
    which the number of input sets is chosen.  ours: inputs and the name of an implementation (None: the support
    table's) -> a result.  reference: inputs on a CPU -> the same in fp64.  allowed: how many times the rival's time
    ours may take.  quick: part of --quick.  kind: how the two results are compared (bench_agreement); "" where they
    differ by design.
    """

    panel: str
    line: str
    tokens: int
    work: Work
    set_bytes: int
    make: Callable[[Maker], Inputs]
    ours: Callable[[Inputs, str | None], Any]
    rival: Rival
    reference: Callable[[Inputs], Any]
    allowed: float = SLOWER
    quick: bool = False
    kind: str = ""

    @property
    def name(self) -> str:
        return f"{self.panel}, {self.line}, S={self.tokens}"


def cases(sizes: Sizes) -> Iterator[Case]:
    """All cases of these sizes, in the order of the table."""
    from sglang_dsa_plugin.tools import bench_cache_cases as cache
    from sglang_dsa_plugin.tools import bench_index_cases as index
    from sglang_dsa_plugin.tools import bench_step

    some = sizes.batches[len(sizes.batches) // 2]
    for layout in SHORT:
        for heads in sizes.heads:
            for batch in sizes.batches:
                yield decode(sizes, layout, heads, batch, quick=heads == sizes.heads[1])
    for layout in SHORT:
        for heads in sizes.heads:
            yield prefill(sizes, layout, heads, quick=heads == sizes.heads[1])
    for tokens in sizes.lengths:
        for batch in sizes.batches:
            yield index.paged_select(sizes, tokens, batch, quick=batch == some)
    yield index.ragged_scores(sizes, sizes.lengths[1], quick=True)
    for tokens in sizes.lengths[1:]:
        for batch in sizes.batches:
            yield index.decode_selection(sizes, tokens, batch, quick=batch == some)
        yield index.prefill_selection(sizes, tokens, quick=tokens == sizes.lengths[1])
        yield index.ragged_selection(sizes, tokens)
    yield index.ragged_select(sizes, sizes.lengths[-1], quick=True)
    for batch in (sizes.batches[0], sizes.batches[-1]):
        yield index.short_rows(sizes, batch, quick=True)
    for layout in SHORT:
        for tokens in sizes.steps:
            for batch in sizes.batches:
                quick = batch == some and tokens in (sizes.steps[0], sizes.steps[len(sizes.steps) // 2])
                yield bench_step.step(sizes, layout, sizes.heads[1], tokens, batch, quick=quick)
    for heads in (sizes.heads[1], sizes.heads[-1]):
        yield dense(sizes, heads)
    yield from cache.cases(sizes)
    # Forced off the kernels for Hopper, ours has to come near the vendor's, not to beat it.
    for tokens in sizes.lengths:
        for batch in sizes.batches:
            yield index.paged_scores(sizes, tokens, batch)
    for layout in SHORT:
        for heads in (sizes.heads[1], sizes.heads[-1]):
            yield prefill(sizes, layout, heads, portable=True)
            for batch in sizes.batches:
                yield decode(sizes, layout, heads, batch, portable=True)


def decode(sizes: Sizes, layout: str, heads: int, batch: int, portable: bool = False, quick: bool = False) -> Case:
    """Sparse MLA of one row a request, each with `cached` rows of its own."""
    picks = min(sizes.k, sizes.cached)
    work = floors.sparse_mla(batch, heads, picks, LATENT_LAYOUTS[layout].row_bytes, batch * picks)
    windows = [sizes.cached] * batch
    return Case(
        f"sparse decode, {SHORT[layout]}{', portable' if portable else ''}",
        f"{heads} heads, B={batch}",
        sizes.cached,
        work,
        int(work.bytes),
        partial(_attention_inputs, layout=layout, heads=heads, windows=windows, requests=batch, sizes=sizes),
        partial(_attend, portable=portable),
        rivals.FA3_SPARSE if layout == "bf16_1152" else rivals.FLASH_MLA_KV,
        _attention_reference,
        PORTABLE_DECODE if portable else SLOWER,
        quick,
        "attention",
    )


def prefill(sizes: Sizes, layout: str, heads: int, portable: bool = False, quick: bool = False) -> Case:
    """Sparse MLA of the last rows of one request: every row picks from what it sees."""
    rows, tokens = sizes.prefill, sizes.cached
    work = floors.sparse_mla(rows, heads, min(sizes.k, tokens), LATENT_LAYOUTS[layout].row_bytes, tokens)
    windows = list(range(tokens - rows + 1, tokens + 1))
    return Case(
        f"sparse prefill, {SHORT[layout]}{', portable' if portable else ''}",
        f"{heads} heads, T={rows}",
        tokens,
        work,
        int(work.bytes),
        partial(_attention_inputs, layout=layout, heads=heads, windows=windows, requests=1, sizes=sizes),
        partial(_attend, portable=portable),
        rivals.FLASH_MLA_SPARSE if layout == "bf16_1152" else rivals.FLASH_MLA_KV,
        _attention_reference,
        1 / 0.5 if portable else SLOWER,
        quick,
        "attention",
    )


def _attention_inputs(maker: Maker, layout: str, heads: int, windows: list[int], requests: int, sizes: Sizes) -> Inputs:
    rows = len(windows)
    seen = torch.tensor(windows, dtype=torch.int32, device=maker.device)
    table = maker.page_table(requests, sizes.cached)
    owner = maker.rows_of_requests(rows) if requests == rows else maker.full(rows, 0)
    return Inputs(
        q=maker.normal(rows, heads, LATENT_DIM + ROPE_DIM),
        rows=maker.latent_rows(table.numel() * PAGE_SIZE, layout),
        slots=maker.slots(maker.picks(seen, sizes.cached, sizes.k), table, owner),
        counts=seen.clamp(max=sizes.k),
        layout=layout,
        scale=SCALE,
    )


def _attend(inputs: Inputs, impl: str | None, portable: bool = False) -> Any:
    if portable and impl is None:
        return portable_attention(inputs)
    # As the layer asks: it knows how many picks a row has, since they come first, and has no use for lse.
    return sparse_mla.sparse_mla(
        inputs.q,
        inputs.rows,
        inputs.slots,
        inputs.scale,
        inputs.layout,
        lengths=inputs.counts,
        impl=impl,
        prefix=True,
        with_lse=False,
    )


def portable_attention(inputs: Inputs) -> Any:
    """As a GPU of SM 8.0 runs it, without instructions of Hopper: by the kernel that the support table takes there,
    within 163 KiB of shared memory, or with the tiles of the Triton table that need no wgmma.
    """
    from sglang_dsa_plugin.kernels.cuda import sparse_mla_portable
    from sglang_dsa_plugin.kernels.triton import index_tables, sparse_mla_tiles
    from sglang_dsa_plugin.kernels.triton import sparse_mla as triton_kernel

    q, picks = inputs.q, inputs.slots.shape[1]
    rows, heads, _ = q.shape
    features = {"layout": inputs.layout, "heads": heads, "k": picks, "dtype": q.dtype, "rows": rows}
    taken = support.choose("sparse_mla", device="cuda", sm=80, packages="all", **features).name
    properties = torch.cuda.get_device_properties(q.device)
    given = (q, inputs.rows, inputs.slots, inputs.scale, inputs.layout)
    processors = properties.multi_processor_count
    if taken.startswith("cuda_portable"):
        gpu = index_tables.Gpu("cuda", 80, processors, 163)
        plan = sparse_mla_portable.choose(gpu, inputs.layout, rows, heads, picks)
        return sparse_mla_portable.sparse_mla(*given, lengths=inputs.counts, plan=plan)
    sm = 10 * properties.major + properties.minor
    tiles = sparse_mla_tiles.choose(sm, processors, inputs.layout, rows, heads, picks, False, 1)
    return triton_kernel.sparse_mla(*given, lengths=inputs.counts, plan=tiles)


def _attention_reference(inputs: Inputs) -> Any:
    return sparse_mla.reference(inputs.q, inputs.rows, inputs.slots, inputs.scale, inputs.layout, lengths=inputs.counts)


def dense(sizes: Sizes, heads: int) -> Case:
    """Dense attention of a prefill of k tokens on expanded keys and values, head sizes 192 and 128."""
    tokens = sizes.k
    work = floors.dense_mha(tokens, heads, 192, 128)

    def make(maker: Maker) -> Inputs:
        q, k = maker.normal(tokens, heads, 192), maker.normal(tokens, heads, 192)
        cu = torch.tensor([0, tokens], dtype=torch.int32, device=maker.device)
        return Inputs(q=q, k=k, v=maker.normal(tokens, heads, 128), cu=cu, scale=SCALE)

    return Case(
        "dense prefill",
        f"{heads} heads",
        tokens,
        work,
        int(work.bytes),
        make,
        # As the layer asks, which has no use for lse.
        lambda i, impl: dense_mha.dense_mha(i.q, i.k, i.v, i.cu, i.cu, i.scale, impl=impl, with_lse=False),
        rivals.DENSE,
        lambda i: dense_mha.reference(i.q, i.k, i.v, i.cu, i.cu, i.scale),
        kind="attention",
    )
