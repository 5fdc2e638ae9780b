"""Indexer arithmetic between the projections and the cache, against float64 written from the formula."""

import math
from typing import NamedTuple

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8, index_page_shape
from sglang_dsa_plugin.indexer.token import TokenIndexer
from sglang_dsa_plugin.ops import key_pages, quant

HEADS = 4


class Keys(NamedTuple):
    """Keys [R,128] as they are cached, scale [R] (None unless fp8)."""

    k: torch.Tensor
    scale: torch.Tensor | None


def keys_of(indexer, projected, norm, positions) -> Keys:
    """Stored in fresh pages and read back, the newest first."""
    shape, dtype = index_page_shape(indexer.key_dtype)
    pages = torch.zeros((2, *shape), dtype=dtype)
    slots = torch.arange(len(projected)).flip(0)
    indexer.store_keys(pages, slots, projected, norm, positions)
    return Keys(*key_pages.load(pages, slots))


def rope_table(positions: int = 4096, theta: float = 1e4) -> torch.Tensor:
    # Angles in float64: at position 4095 float32 angles are off by 2e-4, which is the table's affair, not the
    # indexer's.
    angle = torch.arange(positions).double()[:, None] * theta ** (-torch.arange(0, 64, 2).double() / 64)
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()


def oracle_rope(x: torch.Tensor, positions: torch.Tensor, layout: str, theta: float = 1e4) -> torch.Tensor:
    """First 64 of 128 as 32 complex numbers times exp(i p theta^(-j/32)), in float64."""
    x = x.double().clone()
    angle = positions.double()[:, None] * theta ** (-torch.arange(0, 64, 2).double() / 64)
    turn = torch.polar(torch.ones_like(angle), angle)
    turn = turn.view(turn.shape[0], *[1] * (x.dim() - 2), 32)
    part = x[..., :64]
    pairs = (part[..., :32], part[..., 32:]) if layout == "half" else (part[..., 0::2], part[..., 1::2])
    turned = torch.complex(*pairs) * turn
    if layout == "half":
        x[..., :64] = torch.cat([turned.real, turned.imag], dim=-1)
    else:
        x[..., 0:64:2], x[..., 1:64:2] = turned.real, turned.imag
    return x


def oracle_norm(x: torch.Tensor, norm: torch.nn.Module, eps: float = 1e-6) -> torch.Tensor:
    x = x.double()
    if isinstance(norm, torch.nn.RMSNorm):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.weight.double()
    x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.weight.double() + norm.bias.double()


def random_norm(kind: str) -> torch.nn.Module:
    norm = torch.nn.RMSNorm(128, eps=1e-6) if kind == "rms" else torch.nn.LayerNorm(128, eps=1e-6)
    torch.manual_seed(3)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    if kind == "layer":
        torch.nn.init.normal_(norm.bias, 0.0, 0.3)
    return norm.requires_grad_(False)


def scores(query, key) -> torch.Tensor:
    """sum_h gate relu(q.k) scale, float64, from what the indexer hands to scoring."""
    k = key.k.double() * (1 if key.scale is None else key.scale.double()[:, None])
    return torch.einsum("rh,rhs->rs", query.gate.double(), torch.einsum("rhd,sd->rhs", query.q.double(), k).relu())


def oracle_scores(q, w, k, norm, positions, layout) -> torch.Tensor:
    q = oracle_rope(q.view(-1, HEADS, 128), positions, layout)
    k = oracle_rope(oracle_norm(k, norm), positions, layout)
    gate = w.double() * HEADS**-0.5 * 128**-0.5
    return torch.einsum("rh,rhs->rs", gate, torch.einsum("rhd,sd->rhs", q, k).relu())


def inputs(rows: int = 37, seed: int = 0, scale: float = 1.0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, HEADS * 128, generator=generator)
    w = torch.randn(rows, HEADS, generator=generator)
    k = (torch.randn(rows, 128, generator=generator) + 2.0) * scale  # non-zero mean tells LayerNorm from RMSNorm
    return q, w, k, torch.randint(0, 4096, (rows,), generator=generator)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_float32_scores_equal_the_formula(layout, kind):
    q, w, k, positions = inputs()
    norm = random_norm(kind)
    indexer = TokenIndexer(HEADS, layout, rope_table(), torch.float32)
    got = scores(indexer.queries(q, w, positions), keys_of(indexer, k, norm, positions))
    want = oracle_scores(q, w, k, norm, positions, layout)
    assert (got - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_wrong_layout_on_one_side_is_caught(layout):
    # A wrong rope on the query only, or on the key only, changes the scores far beyond the bound above.
    q, w, k, positions = inputs()
    norm = random_norm("layer")
    right = TokenIndexer(HEADS, layout, rope_table(), torch.float32)
    wrong = TokenIndexer(HEADS, "half" if layout == "interleaved" else "interleaved", rope_table(), torch.float32)
    want = oracle_scores(q, w, k, norm, positions, layout)
    for query, key in ((wrong, right), (right, wrong)):
        got = scores(query.queries(q, w, positions), keys_of(key, k, norm, positions))
        assert (got - want).abs().max() > 1e-2 * want.abs().max()


def test_key_norm_uses_its_own_epsilon():
    # Keys so small that the epsilon decides; 1e-5 in its place would shrink them by a third.
    _, _, k, positions = inputs(scale=1e-3)
    norm = random_norm("layer")
    indexer = TokenIndexer(HEADS, "half", rope_table(), torch.float32)
    got = keys_of(indexer, k, norm, positions).k.double()
    want = oracle_rope(oracle_norm(k, norm, 1e-6), positions, "half")
    other = oracle_rope(oracle_norm(k, norm, 1e-5), positions, "half")
    assert (got - want).abs().max() < 1e-4 < 0.1 < (other - want).abs().max()


def test_gate_below_bf16_resolution_still_orders():
    # Two rows whose head weights differ by less than bf16 can tell.
    q, _, _, positions = inputs(rows=2)
    w = torch.full((2, HEADS), 1.0)
    w[1] += 2.0**-12
    query = TokenIndexer(HEADS, "half", rope_table(), torch.bfloat16).queries(q, w, positions)
    assert query.gate.dtype == torch.float32
    assert (query.gate[1] > query.gate[0]).all()


def test_fp8_rotates_both_sides_and_stays_near():
    # Rotating one side only would destroy the dot products; both sides leave them to fp8 rounding.
    q, w, k, positions = inputs(rows=64)
    k[:, 5] *= 40  # an outlier channel, which is what the rotation is for
    norm = random_norm("layer")
    indexer = TokenIndexer(HEADS, "half", rope_table(), FP8)
    query, key = indexer.queries(q, w, positions), keys_of(indexer, k, norm, positions)
    assert query.q.dtype == FP8 and key.k.dtype == FP8
    want = oracle_scores(q, w, k, norm, positions, "half")
    error = (scores(query, key) - want).abs()
    # e4m3 rounds by at most 2^-4 relative, 0.018 rms; query and key together 0.026 of the dot product's length.
    assert error.mean() < 0.05 * want.abs().mean()
    unrotated = quant.quantize_keys(oracle_rope(oracle_norm(k, norm), positions, "half").float())
    one_sided = (scores(query, Keys(*unrotated)) - want).abs()
    assert one_sided.mean() > 0.5 * want.abs().mean()
    assert all(math.log2(s) == round(math.log2(s)) for s in key.scale.tolist())


def test_query_scale_is_folded_into_the_gate():
    q, w, _, positions = inputs(rows=3)
    plain = TokenIndexer(HEADS, "half", rope_table(), torch.float32).queries(q, w, positions)
    doubled = TokenIndexer(HEADS, "half", rope_table(), FP8).queries(2 * q, w, positions)
    single = TokenIndexer(HEADS, "half", rope_table(), FP8).queries(q, w, positions)
    assert torch.equal(doubled.gate, 2 * single.gate)
    assert torch.equal(doubled.q.float(), single.q.float())
    assert plain.gate.allclose(w * HEADS**-0.5 * 128**-0.5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [FP8, torch.float32])
def test_keys_and_queries_in_one_call_are_those_of_two(kind, dtype):
    q, w, k, positions = inputs(rows=9)
    norm = random_norm(kind)
    indexer = TokenIndexer(HEADS, "half", rope_table(), dtype, impl="torch")
    shape, stored = index_page_shape(dtype)
    pages, slots = torch.zeros((2, *shape), dtype=stored), torch.arange(9).flip(0)
    query = indexer.keys_and_queries(pages, slots, k, norm, q, w, positions, torch.arange(9), 3)
    want, key = indexer.queries(q, w, positions), keys_of(indexer, k, norm, positions)
    assert torch.equal(query.q[4:].float(), want.q[4:].float()) and torch.equal(query.gate[4:], want.gate[4:])
    assert torch.equal(key_pages.load(pages, slots)[0].float(), key.k.float())
