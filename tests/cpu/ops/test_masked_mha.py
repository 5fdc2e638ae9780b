"""ops.masked_mha against its fp64 reference: what is picked, batches of any lengths, prefixes; against dense_mha."""

import math

import pytest
import torch

from sglang_dsa_plugin.kernels.torch_impl import masked_mha as torch_impl
from sglang_dsa_plugin.ops import dense_mha, masked_mha
from tests.cpu.ops.bounds import LargestTensor, assert_attention
from tests.cpu.ops.expanded_inputs import BATCHES, SCALE, check, normal, starts, values


def _picks(queries, keys, width, seed=3):
    """int32 [T, width]: for each query some of the keys it may see, ascending, -1 after them."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for n, s in zip(queries, keys):
        for i in range(n):
            sees = max(0, s - n + i + 1)
            some = torch.randperm(sees, generator=generator)[:width].sort().values.int()
            rows.append(torch.nn.functional.pad(some, (0, width - len(some)), value=-1))
    return torch.stack(rows) if rows else torch.empty(0, width, dtype=torch.int32)


def _inputs(queries, keys, heads, width, width_v, dtype, picks=33, size=1.0):
    q, k, v = values(queries, keys, heads, width, width_v, dtype, size)
    return q, k, v, _picks(queries, keys, picks), starts(queries), starts(keys)


def _check(arguments, scale=SCALE):
    return check(masked_mha.masked_mha, masked_mha.reference, arguments, scale)


@pytest.mark.parametrize("widths", [(192, 128), (256, 256), (64, 192), (24, 16), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_sizes(widths, dtype):
    _check(_inputs([37, 5], [37, 50], 3, *widths, dtype), scale=widths[0] ** -0.5)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("heads, dtype", [(1, torch.float32), (5, torch.float32), (5, torch.bfloat16)])
def test_batches(batch, heads, dtype):
    _check(_inputs(*BATCHES[batch], heads, 40, 24, dtype))


@pytest.mark.parametrize("size", [0.1, 3.0, 30.0])
def test_from_flat_to_sharp_softmax(size):
    _check(_inputs([150, 9, 9], [150, 9, 9], 2, 192, 128, torch.float32, size=size))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_none_anywhere_and_positions_twice(index):
    q, k, v, picks, *cu = _inputs([70, 3], [90, 8], 3, 40, 24, torch.float32)
    picks = picks[:, torch.randperm(picks.shape[1], generator=torch.Generator().manual_seed(4))].to(index)
    picks[5] = -1
    picks[6, 1:] = picks[6].max()
    picks[72] = -1
    before = picks.clone()
    out, lse = _check((q, k, v, picks, *cu))
    assert (out[5] == 0).all() and (lse[72] == -math.inf).all()
    assert torch.equal(picks, before)


@pytest.mark.parametrize("width", [0, 1])
def test_no_picks_at_all(width):
    q, k, v, _, *cu = _inputs([4], [6], 2, 8, 8, torch.float32)
    _check((q, k, v, torch.full((4, width), -1, dtype=torch.int32), *cu))


def test_a_position_outside_the_request_is_never_read():
    q, k, v, picks, *cu = _inputs([9, 4], [20, 6], 2, 24, 16, torch.float32)
    want = masked_mha.masked_mha(q, k, v, picks, *cu, SCALE)
    free = picks == -1
    picks[free] = torch.tensor([20, -7, 2**31 - 1], dtype=torch.int32).repeat(picks.numel())[: int(free.sum())]
    got = masked_mha.masked_mha(q, k, v, picks, *cu, SCALE)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_a_row_did_not_pick_does_not_reach_it(bad):
    q, k, v, picks, cu_q, cu_k = _inputs([140, 1, 12], [200, 70, 15], 2, 24, 16, torch.float32)
    want = masked_mha.masked_mha(q, k, v, picks, cu_q, cu_k, SCALE)
    k[30] = bad
    v[90] = bad
    out, lse = masked_mha.masked_mha(q, k, v, picks, cu_q, cu_k, SCALE)
    hit = ((picks == 30) | (picks == 90)).any(dim=1)
    hit[140:] = False
    assert 0 < hit.sum() < 140 and not out[hit].isfinite().all(dim=(1, 2)).any()
    torch.testing.assert_close(out[~hit], want[0][~hit], rtol=0, atol=2e-6)
    torch.testing.assert_close(lse[~hit], want[1][~hit], rtol=0, atol=2e-6)


def test_equals_dense_attention_when_every_row_picks_what_it_sees():
    q, k, v, picks, *cu = _inputs([150, 2], [200, 30], 3, 48, 32, torch.float32, picks=200)
    got = masked_mha.masked_mha(q, k, v, picks, *cu, SCALE)
    want = dense_mha.dense_mha(q, k, v, *cu, SCALE)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=2e-6)


def test_a_long_request_in_blocks_of_mask(monkeypatch):
    monkeypatch.setattr(torch_impl, "_MASK_VALUES", 5000)
    _check(_inputs([131, 7], [421, 7], 3, 24, 16, torch.float32))


def test_strided_arguments_and_out():
    qkv = normal(50, 3, 192 + 192 + 128)
    q, k, v = qkv.split((192, 192, 128), dim=2)
    cu, picks = starts([30, 20]), _picks([30, 20], [30, 20], 9)
    out = torch.full((50, 3, 128), math.nan)
    got = masked_mha.masked_mha(q, k, v, picks, cu, cu, SCALE, out=out)
    assert got[0] is out
    assert_attention(got, masked_mha.reference(q, k, v, picks, cu, cu, SCALE), f32=True)


def test_memory_is_bounded_by_tiles():
    """4 MiB of scores for each thread and 32 MiB of mask, where the scores of all queries would be 288 MiB."""
    q, k, v, _, *cu = _inputs([1500], [3000], 16, 16, 16, torch.float32, picks=1)
    picks = torch.arange(64, dtype=torch.int32) * 40 + torch.arange(1500, dtype=torch.int32).unsqueeze(1) % 40
    with LargestTensor() as seen:
        masked_mha.masked_mha(q, k, v, picks, *cu, SCALE)
    assert seen.bytes <= max(32 << 20, (4 << 20) * torch.get_num_threads())


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"q": torch.zeros(5, 96)}, "q must be"),
        ({"k": torch.zeros(7, 3, 24)}, r"k must be .*\[\*, 4, 24\]"),
        ({"v": torch.zeros(6, 4, 16)}, r"v must be .*\[7, 4, \*\]"),
        ({"picks": torch.zeros(4, 9, dtype=torch.int32)}, r"picks must be .*\[5, \*\]"),
        ({"picks": torch.zeros(5, 9)}, "picks must be a int32/int64"),
        ({"cu_q": torch.tensor([0, 3, 4])}, "cu_q must be not falling, from 0 to 5"),
        ({"cu_k": torch.tensor([0, 7])}, r"cu_k must be .*\[3\]"),
        ({"scale": math.inf}, "scale must be a finite number"),
        ({"out": torch.zeros(5, 4, 24)}, "out must be"),
        ({"impl": "fa3"}, "impl='fa3' does not exist"),
    ],
)
def test_bad_arguments_are_named(changed, message):
    q, k, v, picks, cu_q, cu_k = _inputs([3, 2], [3, 4], 4, 24, 16, torch.float32)
    arguments = {"q": q, "k": k, "v": v, "picks": picks, "cu_q": cu_q, "cu_k": cu_k, "scale": SCALE} | changed
    with pytest.raises(ValueError, match="masked_mha: " + message):
        masked_mha.masked_mha(**arguments)
