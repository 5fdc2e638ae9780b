"""Cases of what surrounds attention: latent rows stored and read, and expanded keys put together; see bench_cases.

The built-in's side is called as its pool and its dense path call it (`mem_cache/memory_pool.py`,
`attention_forward_methods/forward_mha.py`). Its fp8 rows have other scales, so their bytes differ by design.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sglang_dsa_plugin.cache.layouts import FP8, LATENT_DIM, LATENT_LAYOUTS, ROPE_DIM, ROW_DIM
from sglang_dsa_plugin.ops import latent_rows, mha_keys
from sglang_dsa_plugin.tools.bench_cases import SHORT, Case, Sizes
from sglang_dsa_plugin.tools.bench_floors import Work
from sglang_dsa_plugin.tools.bench_inputs import Maker
from sglang_dsa_plugin.tools.bench_rivals import Call, Inputs, Rival

_NOPE, _VALUE = 128, 128
# In front of a latent and its rope in the projection that they come from.
_QUERY_RANK = 1536


def cases(sizes: Sizes) -> Iterator[Case]:
    """Stored: a decode step and a prefill. The rest: prefill alone has it."""
    for layout in SHORT:
        for rows in (sizes.batches[-1], sizes.lengths[0]):
            yield stored(layout, rows, quick=rows > sizes.batches[-1])
    for layout in SHORT:
        yield read(layout, sizes.lengths[0])
    for heads in (sizes.heads[1], sizes.heads[-1]):
        yield expanded_keys(heads, sizes.lengths[0], quick=heads == sizes.heads[1])


def _row_inputs(maker: Maker, layout: str, rows: int) -> Inputs:
    """A latent of its own, a rope that lies in a wider projection, and a place for each row anywhere in the cache."""
    latent, wide = maker.normal(rows, LATENT_DIM), maker.normal(rows, _QUERY_RANK + ROW_DIM)
    cached = maker.latent_rows(2 * rows + 1, layout)
    # From slot 1 on: the built-in skips slot 0.
    slots = 1 + torch.randperm(2 * rows, generator=maker.generator, device=maker.device)[:rows]
    return Inputs(latent=latent, rope=wide[:, -ROPE_DIM:], rows=cached, slots=slots, layout=layout)


def stored(layout: str, rows: int, quick: bool = False) -> Case:
    """The rows of a step into the cache, quantised where they are fp8; the result is the cache."""
    moved = rows * (2 * ROW_DIM + _row_bytes(layout) + 8)

    def store(inputs: Inputs, impl: str | None) -> torch.Tensor:
        latent_rows.store(inputs.rows, inputs.slots, inputs.latent, inputs.rope, layout, impl=impl)
        return inputs.rows

    def reference(inputs: Inputs) -> torch.Tensor:
        latent_rows.reference_store(inputs.rows, inputs.slots, inputs.latent, inputs.rope, layout)
        return inputs.rows

    return Case(
        f"rows stored, {SHORT[layout]}",
        "one layer",
        rows,
        Work(moved),
        moved,
        lambda maker: _row_inputs(maker, layout, rows),
        store,
        _STORED[layout],
        reference,
        quick=quick,
        kind="copies" if layout == "bf16_1152" else "",
    )


def read(layout: str, rows: int) -> Case:
    """Rows of a cached prefix, or new ones that the cache has rounded, as bf16 and in two parts."""
    moved = rows * (2 * ROW_DIM + _row_bytes(layout) + 8)
    return Case(
        f"rows read, {SHORT[layout]}",
        "one layer",
        rows,
        Work(moved),
        moved,
        lambda maker: _row_inputs(maker, layout, rows),
        lambda i, impl: latent_rows.load_parts(i.rows, i.slots, layout, torch.bfloat16, impl=impl),
        _READ[layout],
        lambda i: latent_rows.reference_load(i.rows, i.slots, layout).bfloat16().split([LATENT_DIM, ROPE_DIM], dim=1),
        quick=True,
        kind="copies",
    )


def expanded_keys(heads: int, tokens: int, quick: bool = False) -> Case:
    """Keys of a dense prefill from what kv_b_proj gives and the rope that the heads share."""
    read_bytes, written = tokens * (heads * _NOPE + ROPE_DIM) * 2, tokens * heads * (_NOPE + ROPE_DIM) * 2

    def make(maker: Maker) -> Inputs:
        both = maker.normal(tokens, heads, _NOPE + _VALUE)
        return Inputs(nope=both[..., :_NOPE], rope=maker.normal(tokens, _QUERY_RANK + ROW_DIM)[:, -ROPE_DIM:])

    return Case(
        "expanded keys",
        f"{heads} heads",
        tokens,
        Work(read_bytes + written),
        read_bytes + written,
        make,
        lambda i, impl: mha_keys.join(i.nope, i.rope, impl=impl),
        Rival("concat_mla_k" if heads == 128 else "concat_and_cast_mha_k", _concatenated),
        lambda i: mha_keys.reference(i.nope, i.rope),
        quick=quick,
        kind="copies",
    )


def _row_bytes(layout: str) -> int:
    spec = LATENT_LAYOUTS[layout]
    return spec.width * spec.dtype.itemsize


def _stored_bf16(inputs: Inputs) -> Call:
    from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_triton

    cache = inputs.rows.unsqueeze(1)

    def call() -> torch.Tensor:
        set_mla_kv_buffer_triton(cache, inputs.slots, inputs.latent.unsqueeze(1), inputs.rope.unsqueeze(1))
        return inputs.rows

    return call


def _stored_fp8(inputs: Inputs) -> Call:
    from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_triton
    from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache_separate

    cache = inputs.rows.unsqueeze(1)

    def call() -> torch.Tensor:
        parts = quantize_k_cache_separate(inputs.latent.unsqueeze(1), inputs.rope.unsqueeze(1))
        set_mla_kv_buffer_triton(cache, inputs.slots, *parts)
        return inputs.rows

    return call


def _read_bf16(inputs: Inputs) -> Call:
    from sglang.kernels.ops.kvcache.mla_buffer import get_mla_kv_buffer_triton

    cache, count = inputs.rows.unsqueeze(1), inputs.slots.shape[0]

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        latent, rope = (cache.new_empty(count, 1, n) for n in (LATENT_DIM, ROPE_DIM))
        get_mla_kv_buffer_triton(cache, inputs.slots, latent, rope)
        return latent.squeeze(1), rope.squeeze(1)

    return call


def _read_fp8(inputs: Inputs) -> Call:
    from sglang.kernels.ops.attention.dsa.dequant_k_cache import dequantize_k_cache_paged_dsa

    cache = inputs.rows.view(FP8).unsqueeze(1)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        whole = dequantize_k_cache_paged_dsa(cache, inputs.slots).squeeze(1)
        return whole[:, :LATENT_DIM].contiguous(), whole[:, LATENT_DIM:]

    return call


def _concatenated(inputs: Inputs) -> Call:
    tokens, heads, width = inputs.nope.shape
    if heads == 128:
        from sglang.kernels.ops.attention.concat_mla import concat_mla_k as join
    else:
        from sglang.kernels.ops.attention.mla_qk_prep import concat_and_cast_mha_k_triton as join

    def call() -> torch.Tensor:
        keys = inputs.nope.new_empty(tokens, heads, width + ROPE_DIM)
        join(keys, inputs.nope, inputs.rope.unsqueeze(1))
        return keys

    return call


_STORED = {
    "bf16_1152": Rival("set_mla_kv_buffer", _stored_bf16),
    "fp8_656": Rival("quantize_k_cache, set_mla_kv_buffer", _stored_fp8),
}
_READ = {
    "bf16_1152": Rival("get_mla_kv_buffer", _read_bf16),
    "fp8_656": Rival("dequantize_k_cache_paged", _read_fp8),
}
