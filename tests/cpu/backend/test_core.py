"""Dense, masked and sparse attention agree on the same tokens; prefixes are merged in request order."""

import pytest
import torch

from sglang_dsa_plugin.backend import core, metadata
from sglang_dsa_plugin.backend.dense_fallback import SPARSE_DECODE, Decision
from sglang_dsa_plugin.cache.layouts import LATENT_DIM, LATENT_LAYOUTS, ROPE_DIM
from sglang_dsa_plugin.ops import latent_rows
from tests.cpu.backend.test_metadata import token_table

HEADS, NOPE, VALUE = 4, 128, 128


def make_batch(prefix: list[int], extend: list[int], path: str) -> tuple[metadata.StepMetadata, torch.Tensor]:
    table = token_table(256, len(prefix))
    longest = max(p + e for p, e in zip(prefix, extend))
    step = metadata.extend_step(
        table,
        torch.arange(len(prefix)),
        torch.tensor(prefix),
        torch.tensor(extend),
        sum(extend),
        longest,
        Decision(path, "test"),
    )
    return step, table


class Layer:
    """Cached rows, projections and queries of one layer; what it answers on each path, [T, H * VALUE]."""

    def __init__(self, prefix: list[int], extend: list[int]) -> None:
        self.prefix, self.extend = prefix, extend
        generator = torch.Generator().manual_seed(sum(prefix) + sum(extend))
        self.lengths = [p + e for p, e in zip(prefix, extend)]
        self.latent = torch.randn(sum(self.lengths), LATENT_DIM, generator=generator)
        self.rope = torch.randn(sum(self.lengths), ROPE_DIM, generator=generator)
        self.w_k = torch.randn(HEADS, NOPE, LATENT_DIM, generator=generator) / 20
        self.w_v = torch.randn(HEADS, LATENT_DIM, VALUE, generator=generator) / 20
        self.q = torch.randn(sum(extend), HEADS, NOPE + ROPE_DIM, generator=generator)
        self.scale = (NOPE + ROPE_DIM) ** -0.5
        self.attention = core.AttentionCore(LATENT_LAYOUTS["fp32_2304"])

    def picks(self, k: int) -> torch.Tensor:
        """Random picks int32 [T, k] among the tokens that each row sees, all of them where they are at most k."""
        rows = make_batch(self.prefix, self.extend, "sparse")[0].lengths.tolist()
        chosen = [torch.randperm(n, generator=torch.Generator().manual_seed(n))[:k].sort().values for n in rows]
        return torch.stack([torch.nn.functional.pad(c, (0, k - len(c)), value=-1) for c in chosen]).to(torch.int32)

    def expanded(self, path: str, picks: torch.Tensor | None = None) -> torch.Tensor:
        step, _ = make_batch(self.prefix, self.extend, path)
        step.picks = picks
        k = torch.einsum("sl,hnl->shn", self.latent, self.w_k)
        k = torch.cat([k, self.rope[:, None].expand(-1, HEADS, -1)], dim=-1)
        v = torch.einsum("sl,hlv->shv", self.latent, self.w_v)
        return self.attention.expanded(self.q, k, v, step, self.scale)

    def sparse(self, picks: torch.Tensor) -> torch.Tensor:
        step, table = make_batch(self.prefix, self.extend, "sparse")
        rows = torch.zeros(64 * (table.max().item() // 64 + 1), 576)
        slots = torch.cat([table[b, :n] for b, n in enumerate(self.lengths)])
        latent_rows.store(rows, slots, self.latent, self.rope, "fp32_2304")
        absorbed = torch.einsum("rhn,hnl->rhl", self.q[..., :NOPE], self.w_k)
        out = self.attention.sparse(absorbed, self.q[..., NOPE:], rows, picks, step, self.scale)
        return torch.einsum("rhl,hlv->rhv", out.view(-1, HEADS, LATENT_DIM), self.w_v).flatten(1)


BATCHES = [([0], [70]), ([0, 64, 3], [5, 1, 66]), ([128], [1]), ([0, 7], [0, 90])]


@pytest.mark.parametrize(("prefix", "extend"), BATCHES)
def test_all_paths_agree_when_every_token_is_picked(prefix, extend):
    layer = Layer(prefix, extend)
    picks = layer.picks(max(layer.lengths))
    dense = layer.expanded("dense")
    assert (dense - layer.sparse(picks)).abs().max() < 1e-5
    assert (dense - layer.expanded("masked", picks)).abs().max() < 1e-5


@pytest.mark.parametrize("k", [1, 32])
@pytest.mark.parametrize(("prefix", "extend"), BATCHES)
def test_masked_equals_sparse(prefix, extend, k):
    layer = Layer(prefix, extend)
    picks = layer.picks(k)
    masked = layer.expanded("masked", picks)
    assert (masked - layer.sparse(picks)).abs().max() < 1e-5
    # Or the comparison would say nothing about the mask.
    assert (masked - layer.expanded("dense")).abs().max() > 0.1


def test_masked_without_picks_is_an_error():
    with pytest.raises(RuntimeError, match="before any indexer of this step had left its picks"):
        Layer([0], [3]).expanded("masked")


def test_dense_on_a_batch_planned_sparse_is_an_error():
    step, _ = make_batch([0], [3], "sparse")
    with pytest.raises(RuntimeError, match="planned sparse \\(test\\)"):
        core.AttentionCore(LATENT_LAYOUTS["fp32_2304"]).expanded(*[torch.zeros(3, 1, 8)] * 3, step, 1.0)


def test_picks_of_another_step_are_refused():
    step, _ = make_batch([0], [3], "sparse")
    with pytest.raises(ValueError, match="3 rows like the step"):
        core.AttentionCore(LATENT_LAYOUTS["fp32_2304"]).sparse(
            torch.zeros(3, 1, 512), torch.zeros(3, 1, 64), torch.zeros(64, 576), torch.zeros(4, 8), step, 1.0
        )


def test_each_phase_runs_its_own_implementation(monkeypatch):
    """A flag may name a kernel for one phase only."""
    ran = []

    def attend(q, *_args, impl=None, **_kwargs):
        ran.append(impl)
        return q[..., :512], None

    monkeypatch.setattr(core.sparse_mla, "sparse_mla", attend)
    attention = core.AttentionCore(LATENT_LAYOUTS["fp32_2304"], impl_sparse="one", impl_prefill="other")
    step, _ = make_batch([0], [3], "sparse")
    arguments = (
        torch.zeros(3, 1, 512),
        torch.zeros(3, 1, 64),
        torch.zeros(64, 576),
        torch.zeros(3, 8).int(),
        step,
        1.0,
    )
    attention.sparse(*arguments)
    attention.sparse(*arguments, prefill=True)
    assert ran == ["one", "other"]


@pytest.mark.parametrize("whole", [True, False])
def test_picks_are_promised_only_where_the_selection_does(monkeypatch, whole):
    """A kernel that takes slots as they are would read outside the cache for a pick that is not there."""
    asked = {}

    def attend(q, *_, **named):
        asked.update(named)
        return torch.zeros(*q.shape[:2], 512), None

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(core.sparse_mla, "sparse_mla", attend)
    step = metadata.decode_step(token_table(256, 2), torch.tensor([0, 1]), torch.tensor([5, 9]), 9, SPARSE_DECODE)
    picks = step.every_token(64)
    attention = core.AttentionCore(LATENT_LAYOUTS["bf16_1152"], whole_picks=whole)
    q = torch.zeros(2, 4, 512).as_subclass(OnGpu)
    attention.sparse(q, torch.zeros(2, 4, 64), torch.zeros(512, 576), picks, step, 0.1)
    assert asked["prefix"] is whole and asked["lengths"].tolist() == [5, 9]
