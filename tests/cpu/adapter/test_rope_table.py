"""The indexer's rope table over a pause of the server, and for contexts longer than the config's."""

import dataclasses

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.managers.scheduler_components import weight_updater

from sglang_dsa_plugin.adapter import rope_table
from sglang_dsa_plugin.adapter.indexer import DsaIndexer
from sglang_dsa_plugin.indexer.token import TokenIndexer
from sglang_dsa_plugin.plan import Refusal

YARN = {
    "rope_type": "deepseek_yarn",
    "factor": 4,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def rope(theta=1e4, scaling=None):
    # Each test has its own: SGLang shares those of one description.
    return get_rope(64, rotary_dim=64, max_position=128, base=theta, rope_scaling=scaling, is_neox_style=True)


def indexer(rotary):
    """A DsaIndexer that has its rope, and no projections: those want a server."""
    made = DsaIndexer.__new__(DsaIndexer)
    torch.nn.Module.__init__(made)
    made.rotary_emb = rotary
    made.token = TokenIndexer(64, "half", rope_table.float_table(rotary), torch.bfloat16)
    made.register_buffer("rope_rows", made.token.cos_sin, persistent=False)
    return made


def expected(positions, theta):
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float64), theta ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    )
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize("positions", [0, 500])
def test_a_pause_keeps_the_table_that_kernels_read(positions):
    """The memory is given away and comes back with anything in it; SGLang copies buffers back in place."""
    made = indexer(rope(theta=20_000.0 + positions))
    made.reserve_positions(positions)
    read = made.token.cos_sin
    before = read.clone()
    kept = weight_updater._export_static_state(made)
    for buffer in made.buffers():
        buffer.fill_(float("nan"))
    read.fill_(float("nan"))
    weight_updater._import_static_state(made, kept)
    assert made.token.cos_sin is read and torch.equal(read, before)


def test_a_context_longer_than_the_configs_has_rope():
    rotary = rope(theta=30_000.0)
    first, second = indexer(rotary), indexer(rotary)
    short = first.token
    for made in (first, second):
        made.reserve_positions(1000)
    assert first.token.cos_sin is second.token.cos_sin is first.rope_rows
    assert first.token == dataclasses.replace(short, cos_sin=first.rope_rows)
    assert len(first.rope_rows) == 1000 and first.rope_rows.dtype == torch.float32
    # An angle of 1000 in float32 is off by 2^-15.
    torch.testing.assert_close(first.rope_rows.double(), expected(1000, 30_000.0), rtol=0, atol=2**-14)
    first.reserve_positions(10)
    assert len(first.rope_rows) == 1000


def test_scaled_rope_ends_where_its_table_ends():
    made = indexer(rope(theta=40_000.0, scaling=YARN))
    assert len(made.rope_rows) == 512
    made.reserve_positions(512)
    with pytest.raises(Refusal, match=r"--context-length 513: .* set --context-length to 512 or less"):
        made.reserve_positions(513)
