"""ops.dense_mha against its fp64 reference: head sizes, batches of any lengths, prefixes; and against sparse_mla."""

import math

import pytest
import torch

from sglang_dsa_plugin.ops import dense_mha, quant, sparse_mla
from tests.cpu.ops.bounds import LargestTensor, assert_attention
from tests.cpu.ops.expanded_inputs import BATCHES, SCALE, check, normal, starts, values


def _inputs(queries, keys, heads, width, width_v, dtype, size=1.0):
    return *values(queries, keys, heads, width, width_v, dtype, size), starts(queries), starts(keys)


def _check(arguments, scale=SCALE):
    return check(dense_mha.dense_mha, dense_mha.reference, arguments, scale)


@pytest.mark.parametrize("widths", [(192, 128), (256, 256), (128, 128), (64, 192), (24, 16), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_sizes(widths, dtype):
    _check(_inputs([37, 5], [37, 50], 3, *widths, dtype), scale=widths[0] ** -0.5)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("heads, dtype", [(1, torch.float32), (5, torch.float32), (5, torch.bfloat16)])
def test_batches(batch, heads, dtype):
    _check(_inputs(*BATCHES[batch], heads, 40, 24, dtype))


@pytest.mark.parametrize("size", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_flat_to_sharp_softmax(size, dtype):
    _check(_inputs([150, 9, 9], [150, 9, 9], 2, 192, 128, dtype, size))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_request_is_the_same_alone_and_in_a_batch(index):
    queries, keys = [9, 30, 9, 200, 12], [9, 64, 21, 230, 12]
    q, k, v, cu_q, cu_k = _inputs(queries, keys, 4, 48, 32, torch.float32)
    out, lse = dense_mha.dense_mha(q, k, v, cu_q.to(index), cu_k.to(index), SCALE)
    for b in range(len(queries)):
        rows, columns = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        ends = torch.tensor([0, queries[b]]), torch.tensor([0, keys[b]])
        alone = dense_mha.dense_mha(q[rows], k[columns], v[columns], *ends, SCALE)
        torch.testing.assert_close(out[rows], alone[0], rtol=0, atol=2e-6)
        torch.testing.assert_close(lse[rows], alone[1], rtol=0, atol=2e-6)


def test_nothing_leaks_between_requests():
    queries, keys = [140, 1, 12, 9, 12], [140, 70, 12, 30, 15]
    q, k, v, cu_q, cu_k = _inputs(queries, keys, 2, 24, 16, torch.float32)
    want = dense_mha.dense_mha(q, k, v, cu_q, cu_k, SCALE)
    v[cu_k[0] + 90] = math.nan
    k[cu_k[2] + 11] = math.inf
    out, lse = dense_mha.dense_mha(q, k, v, cu_q, cu_k, SCALE)
    hit = torch.zeros(sum(queries), dtype=torch.bool)
    hit[:140] = hit[cu_q[2] : cu_q[3]] = True
    assert not out[90:140].isfinite().any() and not out[cu_q[3] - 1].isfinite().any()
    assert torch.equal(out[~hit], want[0][~hit]) and torch.equal(lse[~hit], want[1][~hit])


def test_equals_sparse_attention_that_picks_everything():
    """Absorbed over all keys equals expanded: q' = q_nope W_k against k = (latent W_k^T, rope) and v = latent W_v."""
    heads, tokens, nope, width_v = 4, 90, 128, 128
    latent, rope = normal(tokens, 512), normal(tokens, 64, seed=1)
    w_k, w_v = normal(heads, nope, 512, seed=2) / 22, normal(heads, 512, width_v, seed=3) / 22
    q_nope, q_rope = normal(tokens, heads, nope, seed=4), normal(tokens, heads, 64, seed=5)
    k = torch.cat((torch.einsum("sl,hnl->shn", latent, w_k), rope[:, None].expand(-1, heads, -1)), dim=2)
    v = torch.einsum("sl,hlv->shv", latent, w_v)
    cu = starts([tokens])
    out, lse = dense_mha.dense_mha(torch.cat((q_nope, q_rope), dim=2), k, v, cu, cu, SCALE)
    absorbed = torch.cat((torch.einsum("thn,hnl->thl", q_nope, w_k), q_rope), dim=2)
    slots = torch.arange(tokens).repeat(tokens, 1).tril().int()
    slots[torch.ones_like(slots).triu(1).bool()] = -1
    rows = quant.quantize_latent(latent, rope, "fp32_2304")
    picked, picked_lse = sparse_mla.sparse_mla(absorbed, rows, slots, SCALE, "fp32_2304")
    torch.testing.assert_close(torch.einsum("thl,hlv->thv", picked, w_v), out, rtol=0, atol=1e-5)
    torch.testing.assert_close(picked_lse, lse, rtol=0, atol=1e-5)


def test_strided_arguments_and_out():
    qkv = normal(50, 3, 192 + 192 + 128)
    q, k, v = qkv.split((192, 192, 128), dim=2)
    cu = starts([30, 20])
    out = torch.full((50, 3, 128), math.nan)
    got = dense_mha.dense_mha(q, k, v, cu, cu, SCALE, out=out)
    assert got[0] is out
    assert_attention(got, dense_mha.reference(q, k, v, cu, cu, SCALE), f32=True)


def test_without_lse():
    q, k, v = (torch.randn(9, 4, 192), torch.randn(9, 4, 192), torch.randn(9, 4, 128))
    cu = torch.tensor([0, 9])
    out, lse = dense_mha.dense_mha(q, k, v, cu, cu, 0.1)
    alone, nothing = dense_mha.dense_mha(q, k, v, cu, cu, 0.1, with_lse=False)
    assert torch.equal(out, alone) and lse is not None and nothing is None


def test_memory_is_bounded_by_tiles():
    """4 MiB of scores for each thread, where the scores of all queries would be 288 MiB, and of 128 queries 24 MiB."""
    arguments = _inputs([1500], [3000], 16, 16, 16, torch.float32)
    with LargestTensor() as seen:
        dense_mha.dense_mha(*arguments, SCALE)
    assert seen.bytes <= (4 << 20) * torch.get_num_threads()


def test_many_short_requests_take_few_operations():
    counts = []
    for requests in (8, 64):
        arguments = _inputs([5] * requests, [7] * requests, 4, 24, 16, torch.float32)
        dense_mha.dense_mha(*arguments, SCALE)
        with torch.profiler.profile() as trace:
            dense_mha.dense_mha(*arguments, SCALE)
        counts.append(len(trace.events()))
    assert counts[1] < 1.2 * counts[0]


def _call(**changed):
    q, k, v, cu_q, cu_k = _inputs([3, 2], [3, 4], 4, 24, 16, torch.float32)
    arguments = {"q": q, "k": k, "v": v, "cu_q": cu_q, "cu_k": cu_k, "scale": SCALE} | changed
    return dense_mha.dense_mha(**arguments)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"q": torch.zeros(5, 96)}, "q must be"),
        ({"k": torch.zeros(7, 3, 24)}, r"k must be .*\[\*, 4, 24\]"),
        ({"k": torch.zeros(7, 4, 24).bfloat16()}, "k must be a float32"),
        ({"v": torch.zeros(6, 4, 16)}, r"v must be .*\[7, 4, \*\]"),
        ({"cu_q": torch.tensor([], dtype=torch.int32)}, "cu_q must be of at least one entry"),
        ({"cu_q": torch.tensor([0, 3, 4])}, "cu_q must be not falling, from 0 to 5"),
        ({"cu_q": torch.tensor([0, 6, 5])}, "cu_q must be not falling"),
        ({"cu_k": torch.tensor([1, 3, 7])}, "cu_k must be not falling, from 0 to 7"),
        ({"cu_k": torch.tensor([0, 7])}, r"cu_k must be .*\[3\]"),
        ({"cu_k": torch.tensor([0.0, 3, 7])}, "cu_k must be a int32/int64"),
        ({"scale": math.inf}, "scale must be a finite number"),
        ({"out": torch.zeros(5, 4, 24)}, "out must be"),
        ({"impl": "fa9"}, "impl='fa9' does not exist"),
    ],
)
def test_bad_arguments_are_named(changed, message):
    with pytest.raises(ValueError, match="dense_mha: " + message):
        _call(**changed)
