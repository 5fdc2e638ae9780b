"""ops.sparse_mla against its fp64 reference, in torch and as compiled for this CPU: layouts, shapes, invalid picks,
sinks, and torch's two ways of fetching rows.
"""

import functools
import math

import pytest
import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import FP8, LATENT_LAYOUTS
from sglang_dsa_plugin.kernels.torch_impl import sparse_mla_gather, sparse_mla_union
from sglang_dsa_plugin.ops import quant, sparse_mla
from sglang_dsa_plugin.support_row import Implementation
from tests.cpu.ops.bounds import LargestTensor, assert_attention

LAYOUTS = tuple(LATENT_LAYOUTS)
SCALE = 192**-0.5


def _normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _cache(layout, count, kv_scale=1.0):
    return quant.quantize_latent(_normal(count, 512), _normal(count, 64, seed=1), layout, kv_scale)


def _queries(rows, heads, dtype=torch.bfloat16, size=1.0):
    return (size * _normal(rows, heads, 576, seed=2)).to(dtype)


def _picks(rows, k, count, holes=0.0, seed=3):
    """k distinct slots a row in arbitrary order, or -1 with probability `holes`."""
    g = torch.Generator().manual_seed(seed)
    slots = torch.stack([torch.randperm(count, generator=g)[:k] for _ in range(rows)]) if rows else torch.empty(0, k)
    return slots.masked_fill(torch.rand(rows, k, generator=g) < holes, -1).int()


def _check(q, cache, slots, layout, **more):
    got = sparse_mla.sparse_mla(q, cache, slots, SCALE, layout, **more)
    assert got[0].dtype == q.dtype and got[0].shape == (*q.shape[:2], 512) and got[1].shape == q.shape[:2]
    exact = q.dtype == torch.float32
    assert_attention(got, sparse_mla.reference(q, cache, slots, SCALE, layout, **more), f32=exact)
    return got


def pytest_generate_tests(metafunc):
    metafunc.parametrize(
        "implementation", ["torch"] if "fetched" in metafunc.fixturenames else ["torch", "numba"], indirect=True
    )


@pytest.fixture(autouse=True)
def implementation(request, monkeypatch):
    """Calls of a test that name no implementation take this one."""
    monkeypatch.setattr(sparse_mla, "sparse_mla", functools.partial(sparse_mla.sparse_mla, impl=request.param))


@pytest.fixture
def fetched(monkeypatch):
    """How many rows were gathered for themselves, and how many were served from a union."""
    counts = {"gathered": 0, "united": 0}
    gather, unite = sparse_mla_gather.run, sparse_mla_union._Work._united

    def count_gather(q, *rest):
        counts["gathered"] += q.shape[0]
        gather(q, *rest)

    def count_unite(self, at, end, plan):
        counts["united"] += end - at
        unite(self, at, end, plan)

    monkeypatch.setattr(sparse_mla_gather, "run", count_gather)
    monkeypatch.setattr(sparse_mla_union._Work, "_united", count_unite)
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rows, heads, k", [(1, 16, 64), (3, 1, 33), (7, 5, 129), (2, 128, 40), (19, 8, 100)])
def test_every_layout_and_query_type(layout, dtype, rows, heads, k):
    cache = _cache(layout, 300, kv_scale=0.25)
    _check(_queries(rows, heads, dtype), cache, _picks(rows, k, 300, holes=0.2), layout, kv_scale=0.25)


@pytest.mark.parametrize("k", [1, 2048, 2051])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [0.1, 1.0, 6.0])
def test_full_width_from_flat_to_sharp_softmax(k, dtype, size):
    _check(_queries(3, 4, dtype, size), _cache("bf16_1152", 2500), _picks(3, k, 2500), "bf16_1152")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_prefill_of_one_request_reads_the_union(fetched, layout, dtype, ordered):
    rows, k = 150, 96
    slots = torch.full((rows, k), -1, dtype=torch.int32)
    g = torch.Generator().manual_seed(0)
    for r in range(rows):
        picks = torch.randperm(r + 1, generator=g)[:k]
        slots[r, : len(picks)] = (picks.sort().values if ordered else picks) + 77
    _check(_queries(rows, 4, dtype), _cache(layout, 300), slots, layout)
    assert fetched["united"] == rows and not fetched["gathered"]


def test_scattered_pages_are_united_too(fetched):
    page = torch.tensor([40, 3, 17, 22])
    position = torch.arange(256)
    slot = page[position // 64] * 64 + position % 64
    slots = slot[_picks(40, 180, 256)].int()
    _check(_queries(40, 16), _cache("fp8_656", 41 * 64), slots, "fp8_656")
    assert fetched == {"united": 40, "gathered": 0}


def test_a_decode_batch_is_gathered(fetched):
    slots = torch.arange(8).unsqueeze(1) * 100 + _picks(8, 90, 100)
    _check(_queries(8, 16), _cache("bf16_1152", 800), slots, "bf16_1152")
    assert fetched == {"united": 0, "gathered": 8}


def test_requests_of_both_kinds_in_one_batch(fetched):
    shared = 700 + _picks(64, 150, 200, seed=5)
    alone = torch.arange(13).unsqueeze(1) * 50 + _picks(13, 50, 50).repeat(1, 3)
    slots = torch.cat((alone[:6], shared, alone[6:]))
    _check(_queries(77, 16), _cache("bf16_1152", 900), slots, "bf16_1152")
    assert fetched["united"] >= 48 and fetched["gathered"] >= 6 and sum(fetched.values()) == 77


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_invalid_picks_are_masked_and_never_read(rows):
    cache = _cache("bf16_1152", 200)
    slots = _picks(rows, 64, 100, holes=0.3)
    slots[slots >= 0] += 50
    want = _check(_queries(rows, 16), cache, slots, "bf16_1152")
    # Whatever nobody picked may hold anything: slot 0 and what surrounds the picks included.
    picked = torch.zeros(200, dtype=torch.bool)
    picked[slots[slots >= 0].long()] = True
    cache[~picked] = math.nan
    bad = torch.where(slots < 0, torch.tensor([200, 2**31 - 1, -2, -(2**31)], dtype=torch.int32).repeat(16), slots)
    got = sparse_mla.sparse_mla(_queries(rows, 16), cache, bad, SCALE, "bf16_1152")
    assert_attention(got, sparse_mla.reference(_queries(rows, 16), cache, slots, SCALE, "bf16_1152"))
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("bad", [-2, 90, 91, 2**31 - 1])
def test_one_slot_just_out_of_range(rows, bad):
    slots = _picks(rows, 70, 90)
    slots[rows // 2, 33] = bad
    _check(_queries(rows, 16), _cache("bf16_1152", 90), slots, "bf16_1152")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_row_harms_only_those_who_picked_it(value):
    cache = _cache("fp32_2304", 128)
    slots = _picks(32, 100, 127)
    slots[5, 50] = 127
    want = sparse_mla.reference(_queries(32, 16), cache, slots, SCALE, "fp32_2304")
    cache[127] = value
    out, lse = sparse_mla.sparse_mla(_queries(32, 16), cache, slots, SCALE, "fp32_2304")
    others = torch.arange(32) != 5
    assert_attention((out[others], lse[others]), (want[0][others], want[1][others]))
    assert not out[5].isfinite().all()


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("sink", [False, True])
def test_rows_without_a_valid_pick_are_zero(rows, sink):
    slots = _picks(rows, 75, 90)
    slots[rows // 2] = -1
    more = {"sink": _normal(8)} if sink else {}
    out, lse = _check(_queries(rows, 8), _cache("fp8_656", 90), slots, "fp8_656", **more)
    assert (out[rows // 2] == 0).all() and (lse[rows // 2] == -math.inf).all()


@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sink_joins_the_denominator_but_not_lse(rows, dtype):
    sink = torch.tensor([-math.inf, -30, 0, 4, 90.0])
    slots = _picks(rows, 60, 90, holes=0.1)
    out, lse = _check(_queries(rows, 5, dtype), _cache("bf16_1152", 90), slots, "bf16_1152", sink=sink)
    plain = sparse_mla.sparse_mla(_queries(rows, 5, dtype), _cache("bf16_1152", 90), slots, SCALE, "bf16_1152")
    assert torch.equal(lse, plain[1]) and torch.equal(out[:, 0], plain[0][:, 0])
    assert (out[:, 4].abs() < 1e-6).all()


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_lengths_cut_what_lies_past_them(rows, index):
    slots = _picks(rows, 70, 90)
    lengths = torch.arange(rows).mul(29).remainder(71).to(index)
    q, cache = _queries(rows, 16), _cache("bf16_1152", 90)
    out, lse = _check(q, cache, slots.to(index), "bf16_1152", lengths=lengths)
    cut = slots.masked_fill(torch.arange(70) >= lengths.unsqueeze(1), -1)
    same = sparse_mla.sparse_mla(q, cache, cut, SCALE, "bf16_1152")
    assert torch.equal(out, same[0]) and torch.equal(lse, same[1])


@pytest.mark.parametrize("rows", [1, 40])
def test_a_slot_named_twice_counts_twice(rows):
    slots = _picks(rows, 30, 60)
    slots = torch.cat((slots, slots[:, :7], slots[:, :3]), dim=1)
    _check(_queries(rows, 16), _cache("bf16_1152", 60), slots, "bf16_1152")


@pytest.mark.parametrize("rows, k, count", [(0, 8, 9), (3, 0, 9), (0, 0, 9), (3, 8, 0), (3, 8, 9)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_inputs(rows, k, count, layout):
    slots = torch.full((rows, k), -1, dtype=torch.int32)
    out, lse = _check(_queries(rows, 4), _cache(layout, count), slots, layout)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("rows", [1, 40])
def test_heads_are_independent(rows):
    """16 heads alone equal the same 16 of 128, whatever the others hold."""
    q, cache, slots = _queries(rows, 128), _cache("bf16_1152", 90), _picks(rows, 70, 90)
    some = sparse_mla.sparse_mla(q[:, 16:32].contiguous(), cache, slots, SCALE, "bf16_1152")
    q[:, :16] = math.nan
    whole = sparse_mla.sparse_mla(q, cache, slots, SCALE, "bf16_1152")
    torch.testing.assert_close(whole[1][:, 16:32], some[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole[0][:, 16:32].float(), some[0].float(), rtol=2**-7, atol=1e-6)


def test_a_row_depends_on_its_neighbours_by_rounding_only():
    q, cache, slots = _queries(70, 8, torch.float32), _cache("fp32_2304", 150), _picks(70, 99, 150)
    out, lse = sparse_mla.sparse_mla(q, cache, slots, SCALE, "fp32_2304")
    for r in (0, 31, 69):
        alone = sparse_mla.sparse_mla(q[r : r + 1], cache, slots[r : r + 1], SCALE, "fp32_2304")
        torch.testing.assert_close(out[r], alone[0][0], rtol=0, atol=2e-6)
        torch.testing.assert_close(lse[r], alone[1][0], rtol=0, atol=2e-6)


def test_scales_that_are_no_powers_of_two():
    cache = _cache("fp8_656", 90)
    cache[:, 512:528] = torch.tensor([0.3, 1.7, 0.011, 1.0]).view(torch.uint8)
    for rows in (1, 40):
        _check(_queries(rows, 16), cache, _picks(rows, 70, 90), "fp8_656")


def test_a_layer_of_a_larger_pool_and_strided_arguments():
    pool = _normal(90, 3, 576).bfloat16()
    q, slots = _queries(6, 32)[:, ::2], _picks(6, 140, 200)[:, ::2].clamp(max=89)
    slots = torch.cat((slots, slots), dim=1)[:, : slots.shape[1]]
    assert not q.is_contiguous() and not slots.is_contiguous()
    _check(q, pool[:, 1], slots, "bf16_1152")
    _check(q[:1], pool[:, 1], slots[:1], "bf16_1152")


def test_queries_in_two_strided_parts():
    q, cache, slots = _queries(6, 16), _cache("bf16_1152", 90), _picks(6, 70, 90)
    latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    got = sparse_mla.sparse_mla(latent, cache, slots, SCALE, "bf16_1152", q_rope=q[..., 512:])
    assert all(map(torch.equal, got, sparse_mla.sparse_mla(q, cache, slots, SCALE, "bf16_1152")))


def test_out_is_written_and_returned():
    q, cache, slots = _queries(3, 16), _cache("bf16_1152", 90), _picks(3, 70, 90)
    out = torch.full((3, 16, 512), math.nan, dtype=torch.bfloat16)
    got = sparse_mla.sparse_mla(q, cache, slots, SCALE, "bf16_1152", out=out)
    assert got[0] is out and torch.equal(out, sparse_mla.sparse_mla(q, cache, slots, SCALE, "bf16_1152")[0])


@pytest.mark.parametrize("rows, heads, k", [(1, 1, 1), (2, 3, 9), (40, 4, 50)])
def test_nothing_of_an_earlier_call_remains(rows, heads, k):
    cache, slots = _cache("fp8_656", 90), _picks(rows, k, 90)
    q = _queries(rows, heads)
    want = _check(q, cache, slots, "fp8_656")
    sparse_mla.sparse_mla(torch.full_like(q, math.nan), cache, slots, SCALE, "fp8_656")
    got = sparse_mla.sparse_mla(q, cache, slots, SCALE, "fp8_656")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("apart", [False, True])
def test_memory_is_bounded_by_tiles(apart):
    rows, k = 300, 512
    slots = _picks(rows, k, 30_000) if apart else _picks(rows, k, 600)
    with LargestTensor() as seen:
        sparse_mla.sparse_mla(_queries(rows, 2), _cache("bf16_1152", 30_000), slots, SCALE, "bf16_1152")
    at_once = rows * k * 576 * 4
    assert seen.bytes < at_once / 4


def test_lse_only_when_asked_for_and_a_kept_promise_changes_nothing():
    q, cache, slots = _queries(3, 16), _cache("bf16_1152", 90), _picks(3, 70, 90)
    lengths = torch.tensor([70, 0, 33])
    slots = torch.where(torch.arange(70) < lengths.unsqueeze(1), slots.clamp(min=0), -1)
    want = sparse_mla.sparse_mla(q, cache, slots, SCALE, "bf16_1152")
    out, lse = sparse_mla.sparse_mla(q, cache, slots, SCALE, "bf16_1152", lengths=lengths, prefix=True, with_lse=False)
    assert lse is None and torch.equal(out, want[0])


@pytest.mark.parametrize("takes", [(), ("prefix",), ("q_rope", "prefix", "with_lse")])
def test_an_implementation_is_handed_what_it_takes(monkeypatch, takes):
    """What it does not know, the operator makes up for."""
    seen = {}

    def run(q, *_, **more):
        seen.update(more, width=q.shape[2])
        return q[..., :512], torch.zeros(q.shape[:2])

    q, cache, lengths = _queries(2, 4), _cache("bf16_1152", 9), torch.tensor([3, 0])
    row = Implementation("sparse_mla", "some", run, takes=frozenset(takes))
    monkeypatch.setattr(support, "choose", lambda *_, **__: support.Choice(row, "test"))
    more = {"q_rope": q[..., 512:], "prefix": True, "with_lse": False}
    _, lse = _call(q[..., :512], cache, lengths=lengths, **more)
    assert lse is None and seen.pop("width") == (512 if "q_rope" in takes else 576)
    assert seen.keys() == set(takes) and all(seen[name] is more[name] for name in takes)


def _call(q=None, cache=None, slots=None, scale=SCALE, layout="bf16_1152", **more):
    q = _queries(2, 4) if q is None else q
    cache = _cache("bf16_1152", 9) if cache is None else cache
    return sparse_mla.sparse_mla(q, cache, _picks(2, 5, 9) if slots is None else slots, scale, layout, **more)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"q": torch.zeros(2, 4, 512)}, r"q must be .*576\], got float32 \[2, 4, 512\]"),
        ({"q": torch.zeros(2, 4, 576, dtype=torch.int32)}, "q must be"),
        ({"q_rope": torch.zeros(2, 4, 64).bfloat16()}, r"q must be .*512\], got bfloat16 \[2, 4, 576\]"),
        ({"q": torch.zeros(2, 4, 512), "q_rope": torch.zeros(2, 3, 64)}, r"q_rope must be .*\[2, 4, 64\]"),
        ({"q": torch.zeros(2, 4, 512), "q_rope": torch.zeros(2, 4, 64).half()}, "q_rope must be a float32"),
        ({"cache": torch.zeros(9, 576)}, "kv_rows must be a bfloat16"),
        ({"cache": torch.zeros(9, 576).to(FP8)}, "kv_rows must be a bfloat16"),
        ({"layout": "fp8_656"}, "kv_rows must be a uint8"),
        ({"layout": "bf16"}, "layout must be one of bf16_1152"),
        ({"slots": torch.zeros(3, 5, dtype=torch.int32)}, r"slots must be .*\[2, \*\]"),
        ({"slots": torch.zeros(2, 5)}, "slots must be a int32/int64"),
        ({"scale": math.nan}, "scale must be a finite number"),
        ({"kv_scale": 0.0}, "kv_scale must be"),
        ({"sink": torch.zeros(5)}, "sink must be"),
        ({"sink": torch.zeros(4).double()}, "sink must be"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths must be"),
        ({"prefix": True}, "prefix must be promised together with lengths"),
        ({"out": torch.zeros(2, 4, 512)}, "out must be a bfloat16"),
        ({"impl": "flashmla"}, "impl='flashmla' does not exist"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match="sparse_mla: " + message):
        _call(**arguments)


def test_scores_of_minus_infinity_count_nothing_wherever_they_stand():
    cache = torch.full((64, 576), -3.0)
    cache[:32, 0] = -math.inf
    out, lse = sparse_mla.sparse_mla(
        torch.ones(1, 2, 576), cache, torch.arange(64).unsqueeze(0).int(), 0.07, "fp32_2304"
    )
    # The latents that count are all alike; the others have weight zero, and 0 * -inf is no number in their column.
    assert torch.allclose(lse, torch.tensor(0.07 * -3 * 576 + math.log(32)), rtol=1e-6)
    assert torch.allclose(out[..., 1:], torch.tensor(-3.0))
