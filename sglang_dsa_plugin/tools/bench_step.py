"""The attention part of one layer's decode step as one case: indexer front, picks, slots, sparse attention.

The projections around it are left out on both sides. Rope is interleaved (GLM-5's indexer), where the built-in fuses
most of its front; in the half-split form it launches more.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dsa_plugin.cache.layouts import INDEX_DIM, LATENT_DIM, LATENT_LAYOUTS, PAGE_SIZE, ROPE_DIM
from sglang_dsa_plugin.ops import index_front, index_select, select, sparse_mla
from sglang_dsa_plugin.tools import bench_floors, bench_index_cases, bench_rivals
from sglang_dsa_plugin.tools.bench_cases import SCALE, SHORT, Case, Sizes
from sglang_dsa_plugin.tools.bench_inputs import Maker
from sglang_dsa_plugin.tools.bench_rivals import Inputs

ROPE, EPS = "interleaved", 1e-6


def step(sizes: Sizes, layout: str, heads: int, tokens: int, batch: int, quick: bool = False) -> Case:
    """One row a request, its last key stored by the step itself; the page table covers the whole context."""
    picks = min(sizes.k, tokens)
    attention = bench_floors.sparse_mla(batch, heads, picks, LATENT_LAYOUTS[layout].row_bytes, batch * picks)
    # A row that keeps every token needs no scores. Otherwise its keys are read once, and no score has to be written.
    scored = batch * tokens if tokens > sizes.k else 0
    keys = bench_floors.Work(scored * (INDEX_DIM + 4) + batch * sizes.index_heads * INDEX_DIM * 2)
    work = bench_floors.Work(attention.bytes + keys.bytes, attention.flops)
    return Case(
        f"decode step, {SHORT[layout]}",
        f"{heads} heads, B={batch}",
        tokens,
        work,
        int(attention.bytes) + batch * tokens * (INDEX_DIM + 4),
        lambda maker: inputs_of(maker, sizes, layout, heads, tokens, batch),
        run,
        bench_rivals.STEP,
        reference,
        quick=quick,
        # The built-in does not rotate queries and keys, so past k it picks others among the same random keys.
        kind="attention" if tokens <= sizes.k else "",
    )


def inputs_of(maker: Maker, sizes: Sizes, layout: str, heads: int, tokens: int, batch: int) -> Inputs:
    """What the projections of a layer leave, and both caches."""
    lengths = maker.full(batch, tokens)
    inputs = bench_index_cases.paged_inputs(maker, lengths, tokens, sizes, sizes.context)
    last = maker.full(batch, tokens - 1).unsqueeze(1)
    vars(inputs).update(
        key=maker.normal(batch, INDEX_DIM),
        norm=maker.normal(INDEX_DIM, dtype=torch.float32),
        bias=maker.normal(INDEX_DIM, dtype=torch.float32),
        projected=maker.normal(batch, sizes.index_heads * INDEX_DIM),
        weights=maker.normal(batch, sizes.index_heads, dtype=torch.float32),
        positions=last.squeeze(1).long(),
        cos_sin=maker.cos_sin(tokens),
        new_slots=maker.slots(last, inputs.table, inputs.owner).squeeze(1).long(),
        q_latent=maker.normal(batch, heads, LATENT_DIM),
        q_rope=maker.normal(batch, heads, ROPE_DIM),
        rows=maker.latent_rows(batch * -(-tokens // PAGE_SIZE) * PAGE_SIZE, layout),
        counts=lengths.clamp(max=sizes.k),
        layout=layout,
        scale=SCALE,
    )
    return inputs


def run(i: Inputs, impl: str | None) -> Any:
    """The operators in the order in which the indexer and the backend call them."""
    return _run(i, impl, impl)


def run_with_attention(i: Inputs, attention: str | None) -> Any:
    """`run` with this implementation of sparse attention, the others by the support table."""
    return _run(i, None, attention)


def _run(i: Inputs, impl: str | None, attention: str | None) -> Any:
    keys, queries = (i.pages, i.new_slots, i.key, i.norm, i.bias, EPS), (i.projected, i.weights, i.positions, i.cos_sin)
    q, gate = index_front.store_and_prepare(*keys, *queries, ROPE, i.lengths, i.k_picks, impl=impl)
    slots = torch.empty((q.shape[0], i.k_picks), dtype=torch.int32, device=q.device)
    plan, rows = bench_index_cases.planned(i, impl), (i.lengths, i.table, i.owner)
    index_select.paged(q, i.pages, gate, *rows, i.k_picks, slots_out=slots, plan=plan, impl=impl)
    rest = {"lengths": i.counts, "q_rope": i.q_rope, "prefix": True, "with_lse": False}
    return sparse_mla.sparse_mla(i.q_latent, i.rows, slots, i.scale, i.layout, impl=attention, **rest)


def reference(i: Inputs) -> Any:
    """The operators' references one after the other; `pages` is changed as by `run`."""
    keys, queries = (i.pages, i.new_slots, i.key, i.norm, i.bias, EPS), (i.projected, i.weights, i.positions, i.cos_sin)
    q, gate = index_front.reference(*keys, *queries, ROPE)
    picks = index_select.reference_paged(q, i.pages, gate, i.lengths, i.table, i.owner, i.k_picks)
    slots = select.reference_slots(picks, i.table, i.owner)
    query = torch.cat((i.q_latent, i.q_rope), dim=-1)
    return sparse_mla.reference(query, i.rows, slots, i.scale, i.layout, lengths=i.counts)
