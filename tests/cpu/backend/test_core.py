"""Dense and sparse attention agree while every token is picked; prefixes are merged in request order."""

import pytest
import torch

from sglang_dsa_plugin.backend import core, metadata
from sglang_dsa_plugin.backend.dense_fallback import Decision
from sglang_dsa_plugin.cache.layouts import LATENT_DIM, LATENT_LAYOUTS, ROPE_DIM
from sglang_dsa_plugin.ops import latent_rows
from tests.cpu.backend.test_metadata import token_table

HEADS, NOPE, VALUE = 4, 128, 128


def make_batch(prefix: list[int], extend: list[int], dense: bool) -> tuple[metadata.StepMetadata, torch.Tensor]:
    table = token_table(256, len(prefix))
    longest = max(p + e for p, e in zip(prefix, extend))
    step = metadata.extend_step(
        table,
        torch.arange(len(prefix)),
        torch.tensor(prefix),
        torch.tensor(extend),
        sum(extend),
        longest,
        Decision(dense, "test"),
    )
    return step, table


@pytest.mark.parametrize(("prefix", "extend"), [([0], [70]), ([0, 64, 3], [5, 1, 66]), ([128], [1])])
def test_dense_equals_sparse_when_every_token_is_picked(prefix, extend):
    generator = torch.Generator().manual_seed(sum(prefix) + sum(extend))
    lengths = [p + e for p, e in zip(prefix, extend)]
    latent = torch.randn(sum(lengths), LATENT_DIM, generator=generator)
    rope = torch.randn(sum(lengths), ROPE_DIM, generator=generator)
    w_k = torch.randn(HEADS, NOPE, LATENT_DIM, generator=generator) / 20
    w_v = torch.randn(HEADS, LATENT_DIM, VALUE, generator=generator) / 20
    q = torch.randn(sum(extend), HEADS, NOPE + ROPE_DIM, generator=generator)
    scale = (NOPE + ROPE_DIM) ** -0.5

    dense_step, table = make_batch(prefix, extend, dense=True)
    k = torch.cat([torch.einsum("sl,hnl->shn", latent, w_k), rope[:, None].expand(-1, HEADS, -1)], dim=-1)
    v = torch.einsum("sl,hlv->shv", latent, w_v)
    attention = core.AttentionCore(LATENT_LAYOUTS["fp32_2304"])
    dense = attention.dense(q, k, v, dense_step, scale)

    sparse_step, _ = make_batch(prefix, extend, dense=False)
    rows = torch.zeros(64 * (table.max().item() // 64 + 1), 576)
    slots = torch.cat([table[b, :n] for b, n in enumerate(lengths)])
    latent_rows.store(rows, slots, latent, rope, "fp32_2304")
    positions = torch.arange(max(lengths))[None].expand(sum(extend), -1)
    picks = torch.where(positions < sparse_step.lengths[:, None], positions, -1).to(torch.int32)
    absorbed = torch.einsum("rhn,hnl->rhl", q[..., :NOPE], w_k)
    out = attention.sparse(absorbed, q[..., NOPE:], rows, picks, sparse_step, scale)
    sparse = torch.einsum("rhl,hlv->rhv", out.view(-1, HEADS, LATENT_DIM), w_v).flatten(1)
    assert (dense - sparse).abs().max() < 1e-5


def test_dense_on_a_batch_planned_sparse_is_an_error():
    step, _ = make_batch([0], [3], dense=False)
    with pytest.raises(RuntimeError, match="planned sparse \\(test\\)"):
        core.AttentionCore(LATENT_LAYOUTS["fp32_2304"]).dense(*[torch.zeros(3, 1, 8)] * 3, step, 1.0)


def test_picks_of_another_step_are_refused():
    step, _ = make_batch([0], [3], dense=False)
    with pytest.raises(ValueError, match="3 rows like the step"):
        core.AttentionCore(LATENT_LAYOUTS["fp32_2304"]).sparse(
            torch.zeros(3, 1, 512), torch.zeros(3, 1, 64), torch.zeros(64, 576), torch.zeros(4, 8), step, 1.0
        )


@pytest.mark.parametrize(("prefix", "extend"), [([0, 0], [2, 3]), ([4, 0, 7], [1, 2, 3]), ([5], [2]), ([0, 3], [4, 0])])
def test_prefix_and_new_keys_in_request_order(prefix, extend):
    step, _ = make_batch(prefix, extend, dense=True)
    old = torch.arange(sum(prefix)).float()[:, None]
    new = 100 + torch.arange(sum(extend)).float()[:, None]
    merged = core.interleave_prefix(old, new, step, torch.tensor(prefix), torch.tensor(extend))
    expected, o, n = [], 0, 0
    for p, e in zip(prefix, extend):
        expected += old[o : o + p, 0].tolist() + new[n : n + e, 0].tolist()
        o, n = o + p, n + e
    assert merged[:, 0].tolist() == expected
