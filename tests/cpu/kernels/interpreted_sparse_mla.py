"""The portable sparse MLA kernel under Triton's interpreter, against fp64. Run by test_triton_sparse_mla.py in a
process of its own: TRITON_INTERPRET has to be set before Triton is imported, and would change every kernel there.
"""

import math

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.kernels.triton import sparse_mla as kernels
from sglang_dsa_plugin.kernels.triton import sparse_mla_tiles as tiles
from sglang_dsa_plugin.ops import quant, sparse_mla
from tests.cpu.kernels import triton_interpreter  # noqa: F401
from tests.cpu.ops.bounds import assert_attention

SCALE = 192**-0.5
LAYOUTS = ["bf16_1152", "fp8_656", "fp8_576"]


def rows_of(count, layout, seed=0):
    g = torch.Generator().manual_seed(seed)
    latent, rope = torch.randn(count, 512, generator=g), torch.randn(count, 64, generator=g)
    return quant.reference_quantize_latent(latent, rope, layout, kv_scale_of(layout))


def kv_scale_of(layout):
    return 0.02 if layout == "fp8_576" else 1.0


def queries(rows, heads, dtype=torch.bfloat16, seed=1):
    return torch.randn(rows, heads, 576, generator=torch.Generator().manual_seed(seed)).to(dtype)


def picks(rows, k, count, seed=2):
    return torch.randint(0, count, (rows, k), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def plan_of(heads, k, splits):
    blocks = -(-k // 32)
    per = -(-blocks // splits) * 32
    return tiles.Plan("gather", 16 if heads <= 16 else 32, 32, 4, 2, per, -(-k // per))


def check(q, kv, slots, layout, splits=1, sink=None, lengths=None, out=None):
    plan = plan_of(q.shape[1], slots.shape[1], splits)
    got = kernels.sparse_mla(q, kv, slots, SCALE, layout, kv_scale_of(layout), sink, lengths, out, plan)
    want = sparse_mla.reference(q, kv, slots, SCALE, layout, kv_scale_of(layout), sink, lengths)
    assert got[0].dtype == q.dtype
    assert_attention(got, want)
    return got


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "k", "splits", "dtype"),
    [
        (1, 1, 1, torch.bfloat16),
        (16, 64, 1, torch.bfloat16),
        (3, 100, 3, torch.bfloat16),
        (17, 33, 2, torch.float16),
        (5, 40, 1, torch.float32),
    ],
)
def test_equals_the_reference(layout, heads, k, splits, dtype):
    kv = rows_of(90, layout)
    slots = picks(2, k, 90)
    slots[0, 3:20] = -1
    check(queries(2, heads, dtype), kv, slots, layout, splits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sink", [False, True])
def test_rows_without_picks_and_slots_out_of_range(splits, sink):
    kv = rows_of(50, "bf16_1152")
    slots = picks(4, 70, 50)
    slots[0] = -1
    slots[1] = 50
    slots[2, ::2] = torch.tensor([-1, 50, -7, 2**31 - 1, -(2**31)], dtype=torch.int32).repeat(7)
    slots[3, 40:] = -1
    sinks = torch.tensor([0.0, -3.0, 50.0, -torch.inf]) if sink else None
    out, lse = check(queries(4, 4), kv, slots, "bf16_1152", splits, sinks)
    assert (out[:2] == 0).all() and (lse[:2] == -math.inf).all()


@pytest.mark.parametrize("splits", [1, 2])
def test_lengths_end_a_row_and_what_lies_behind_is_not_seen(splits):
    kv = rows_of(50, "fp8_656")
    slots = picks(3, 70, 50)
    lengths = torch.tensor([0, 1, 65], dtype=torch.int64)
    first = check(queries(3, 2), kv, slots, "fp8_656", splits, lengths=lengths)
    for r, n in enumerate(lengths):
        slots[r, n:] = 2**30
    again = check(queries(3, 2), kv, slots, "fp8_656", splits, lengths=lengths)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_is_seen_where_it_is_picked_and_nowhere_else(layout):
    kv = rows_of(40, layout)
    flat = kv.view(torch.uint8)
    flat[7, 4:6] = 0xFF
    slots = picks(2, 50, 40)
    slots[slots == 7] = 8
    slots[1, 20] = 7
    slots[0, 10:] = -1
    q = queries(2, 3)
    out, lse = kernels.sparse_mla(q, kv, slots, SCALE, layout, kv_scale_of(layout), plan=plan_of(3, 50, 1))
    assert not out[0].isnan().any() and not lse[0].isnan().any()
    assert out[1].isnan().any(1).all() and lse[1].isnan().all()


def test_every_e4m3_code_and_any_scale():
    kv = rows_of(8, "fp8_656")
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    kv[:, :512] = codes.repeat(2)
    kv[:, 512:528] = torch.tensor([0.3, 1.7, 0.011, 2.0**-9]).view(torch.uint8)
    kv[1:4, 512:528] = torch.tensor([1e-3, 3e-5, 7.0, 1.0]).view(torch.uint8)
    check(queries(1, 2) * 0.01, kv, picks(1, 8, 8), "fp8_656")
    rows = torch.zeros(4, 576, dtype=FP8)
    rows.view(torch.uint8)[:, :256] = codes
    check(queries(1, 2) * 0.01, rows, picks(1, 8, 4), "fp8_576")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_arguments_and_wide_indices(layout):
    wide = rows_of(60, layout)
    width = wide.shape[1]
    kv = torch.cat((wide.view(torch.uint8), torch.full((60, 20), 255, dtype=torch.uint8)), 1).view(wide.dtype)[
        :, :width
    ]
    assert kv.stride(0) != width
    q = queries(2, 6)[:, ::2]
    out = torch.full((2, 6, 700), 9.0, dtype=torch.bfloat16)
    slots = torch.cat((picks(2, 40, 60), torch.full((2, 9), 3)), 1).long()[:, :40]
    got, _ = check(q, kv, slots, layout, out=out[:, ::2, 100:612])
    assert got.data_ptr() == out[:, ::2, 100:612].data_ptr()
    assert (out[:, 1::2] == 9).all() and (out[:, :, :100] == 9).all() and (out[:, :, 612:] == 9).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_queries_in_two_strided_parts(layout, dtype):
    q, kv, slots = queries(2, 6, dtype), rows_of(60, layout), picks(2, 40, 60)
    # As a server has them: absorbed queries come out of a product by heads, the rest is a part of wider vectors.
    latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    rope = torch.cat((torch.full_like(q[..., :128], 7.0), q[..., 512:]), dim=-1)[..., 128:]
    assert not latent.is_contiguous() and not rope.is_contiguous()
    arguments = (kv, slots, SCALE, layout, kv_scale_of(layout))
    for splits in (1, 2):
        plan = plan_of(6, 40, splits)
        got = kernels.sparse_mla(latent, *arguments, plan=plan, q_rope=rope)
        want = kernels.sparse_mla(q, *arguments, plan=plan)
        assert got[0].dtype == dtype and all(torch.equal(a, b) for a, b in zip(got, want))


def test_nothing_to_do():
    kv = rows_of(4, "bf16_1152")
    for q, rows, slots in [
        (queries(0, 4), kv, picks(0, 8, 4)),
        (queries(2, 4), kv, picks(2, 0, 4)),
        (queries(2, 4), kv[:0], picks(2, 8, 4)),
    ]:
        out, lse = kernels.sparse_mla(q, rows, slots, SCALE, "bf16_1152")
        assert out.shape == (len(q), 4, 512) and (out == 0).all() and (lse == -math.inf).all()


def test_rows_off_their_bounds_are_refused():
    kv = torch.zeros(4 * 576 + 1, dtype=torch.uint8)[1:].view(4, 576).view(FP8)
    with pytest.raises(ValueError, match=r"sparse_mla: kv_rows must be on 4-byte bounds row by row .*got a row stride"):
        kernels.sparse_mla(queries(1, 1), kv, picks(1, 4, 4), SCALE, "fp8_576")


def test_the_tables_own_plan():
    kv = rows_of(30, "bf16_1152")
    slots = picks(2, 130, 30)
    got = kernels.sparse_mla(queries(2, 2), kv, slots, SCALE, "bf16_1152")
    assert_attention(got, sparse_mla.reference(queries(2, 2), kv, slots, SCALE, "bf16_1152"))
