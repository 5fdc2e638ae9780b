"""Sparse MLA in CUDA C++ for GPUs of many kinds, built by g++ (cuda_emulation.h) and held to fp64."""

import ctypes
import dataclasses
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import sparse_mla_portable
from sglang_dsa_plugin.kernels.cuda.sparse_mla_portable import Plan
from sglang_dsa_plugin.kernels.triton import index_tables
from sglang_dsa_plugin.ops import quant
from tests.cpu.kernels import cuda_emulation
from tests.cpu.ops.bounds import assert_attention

pytestmark = cuda_emulation.needs

SCALE = 192**-0.5
RUN = """
extern "C" bool run(const u16* q, const u16* q_rope, const char* rows, const slot_t* slots, const int* lengths,
                    const float* sink, void* out, float* lse, const long long* strides, const int* sizes,
                    float scale_log2, int blocks, int seed) {
    return emulate(blocks, seed, [=] {
        sparse_mla_portable(q, q_rope, rows, slots, lengths, sink, out, lse, strides[0], strides[1], strides[2],
                            strides[3], strides[4], strides[5], strides[6], strides[7], sizes[0], sizes[1], sizes[2],
                            sizes[3], sizes[4], scale_log2);
    });
}
"""
N = 400


def build(folder, plan, lengths, sink, wide, decodes=False):
    """The kernel built for a plan, called as in `attend`. decodes: with the instruction for fp8 codes."""
    source = cuda_emulation.source_text("sparse_mla_portable.cu")
    shared = "extern __shared__ __align__(128) char shared[];"
    assert source.count(shared) == 1 and "asm" not in source
    macros = plan.defines(lengths=lengths, sink=sink, wide_slots=wide, pdl=False)
    macros |= {"DECODES": int(decodes), "THREADS": plan.threads, "SHARED": plan.shared_bytes}
    path = folder / "kernel.so"
    options = ["-std=c++17", "-O2", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared"]
    headers = [Path(__file__).with_name(name).read_text() for name in ("cuda_emulation.h", "cuda_emulation_tiles.h")]
    subprocess.run(
        ["g++", *options, *(f"-D{name}={value}" for name, value in macros.items()), "-o", path, "-x", "c++", "-"],
        input="".join(headers) + source.replace(shared, "char* shared = shared_memory();") + RUN,
        check=True,
        text=True,
    )
    run = ctypes.CDLL(str(path)).run
    address, number = ctypes.c_void_p, ctypes.c_int
    run.argtypes = [*[address] * 10, ctypes.c_float, number, number]
    run.restype = ctypes.c_bool
    return run


def attend(run, plan, q, kv, slots, sink=None, lengths=None, seed=0):
    """(out, lse) of one emulated launch, splits joined as the merge does; q [R, H, 576] in two parts, both padded."""
    rows, heads, _ = q.shape
    nope, rope = torch.full((rows, heads + 1, 520), math.nan).bfloat16(), torch.full((rows, heads, 72), 7.0).bfloat16()
    nope[:, :heads, :512], rope[..., :64] = q[..., :512], q[..., 512:]
    partial = plan.splits > 1
    out = torch.full((rows, plan.splits, heads, 512), 9.0, dtype=torch.float32 if partial else torch.bfloat16)
    lse = torch.full((rows, plan.splits, heads), 9.0)
    strides = [
        nope.stride(0),
        520,
        rope.stride(0),
        72,
        kv.stride(0) * kv.element_size(),
        slots.stride(0),
        heads * 512,
        512,
    ]
    sizes = [kv.shape[0], heads, slots.shape[1], plan.split_picks, plan.splits]
    given = (nope, rope, kv, slots, lengths, sink, out, lse)
    assert run(
        *(None if t is None else t.data_ptr() for t in given),
        (ctypes.c_longlong * 8)(*strides),
        (ctypes.c_int * 5)(*sizes),
        SCALE / math.log(2),
        rows * plan.splits * -(-heads // plan.heads),
        seed,
    ), "threads wait forever"
    if not partial:
        return out[:, 0], lse[:, 0]
    natural = lse.double() * math.log(2)
    total = natural.logsumexp(1)
    weight = (natural - total.masked_fill(total == -math.inf, 0).unsqueeze(1)).exp().unsqueeze(-1)
    return torch.where(weight != 0, out.double() * weight, 0).sum(1), total.float()


def reference(q, kv, slots, sink=None, lengths=None):
    """fp64, row by row."""
    results = []
    for r in range(q.shape[0]):
        mine = slots[r] if lengths is None else slots[r, : max(0, int(lengths[r]))]
        rows = kv[mine[(mine >= 0) & (mine < kv.shape[0])].long()]
        values = quant.dequantize_latent(rows, "fp8_656", impl="torch") if kv.dtype == torch.uint8 else rows
        values = values.double()
        scores = SCALE * (q[r].double() @ values.T)
        lse, out = scores.logsumexp(1), scores.softmax(1) @ values[:, :512]
        if sink is not None and len(values):
            out = out / (1 + (sink.double() - lse).exp())[:, None]
        results.append((out if len(values) else torch.zeros_like(out), lse))
    return tuple(map(torch.stack, zip(*results, strict=True)))


def inputs(form, rows, seed=0, latents=1.0):
    """(q, kv, slots) for a form. latents: factor of the first 512 values of a row."""
    g = torch.Generator().manual_seed(seed)
    q, kv = torch.randn(rows, form.heads, 576, generator=g).bfloat16(), torch.randn(N, 576, generator=g)
    kv[:, :512] *= latents
    slots = torch.randint(0, N, (rows, form.picks), generator=g, dtype=torch.int32)
    if form.plan.fp8:
        return q, quant.quantize_latent(kv[:, :512], kv[:, 512:], "fp8_656", impl="torch"), slots
    return q, kv.bfloat16(), slots


@dataclasses.dataclass
class Form:
    """A kernel, and what it is asked: all numbers of stages, head tiles that are not full, splits."""

    plan: Plan
    heads: int
    picks: int
    lengths: bool = False
    sink: bool = False
    wide: bool = False
    decodes: bool = False
    run: Callable[..., bool] = None

    def given(self, slots, lengths):
        """(slots, lengths) as this kernel takes them."""
        if lengths is None:
            lengths = torch.full((slots.shape[0],), self.picks, dtype=torch.int32)
        return slots.long() if self.wide else slots, lengths if self.lengths else None


FORMS = {
    "64 heads": Form(Plan(64, 3, 224, 1), 64, 200, sink=True),
    "tiles of 16": Form(Plan(64, 4, 128, 1, tile=16, kept=32), 40, 128, lengths=True, sink=True),
    "spread": Form(Plan(64, 3, 96, 3, spread=True), 60, 250, lengths=True, wide=True),
    "spread, five stages": Form(Plan(64, 5, 224, 1, spread=True), 40, 200, sink=True),
    "four stages": Form(Plan(64, 4, 416, 1), 64, 400, sink=True),
    "splits": Form(Plan(64, 3, 96, 4), 50, 300, lengths=True),
    "32 heads": Form(Plan(32, 5, 192, 1), 20, 171, wide=True),
    "splits of two tiles of heads": Form(Plan(64, 5, 96, 3), 70, 288),
    "splits of 32 heads": Form(Plan(32, 3, 64, 4), 32, 250, lengths=True, wide=True),
    "fp8": Form(Plan(64, 3, 224, 1, True), 50, 200, sink=True),
    "fp8, splits": Form(Plan(64, 1, 128, 2, True), 64, 200, lengths=True, decodes=True),
    "fp8, 32 heads": Form(Plan(32, 2, 224, 1, True), 32, 200, lengths=True, wide=True),
    "together": Form(Plan(64, 3, 128, 2, kept=15, together=2), 60, 200, lengths=True),
    "fp8, together": Form(Plan(64, 1, 128, 2, True, kept=15, together=2), 60, 200, lengths=True),
    "fp8, tiles of 16": Form(Plan(64, 2, 112, 2, True, 16, 30), 64, 200, wide=True),
}


SHORT = {"tiles of 16", "splits", "splits of 32 heads", "fp8, splits", "fp8, tiles of 16", "together", "fp8, together"}
SHORT |= {"spread"}
PARAMS = [pytest.param(name, marks=() if name in SHORT else pytest.mark.full) for name in FORMS]


@pytest.fixture(scope="module", params=PARAMS, ids=str)
def form(request, tmp_path_factory):
    made = FORMS[request.param]
    folder = tmp_path_factory.mktemp("emulated")
    run = build(folder, made.plan, made.lengths, made.sink, made.wide, made.decodes)
    return dataclasses.replace(made, run=run)


def held(form, q, kv, slots, lengths=None, seed=0):
    """One launch against fp64."""
    slots, lengths = form.given(slots, lengths)
    sink = torch.randn(form.heads, generator=torch.Generator().manual_seed(seed)) if form.sink else None
    got = attend(form.run, form.plan, q, kv, slots, sink, lengths, seed)
    assert_attention(got, reference(q, kv, slots, sink, lengths))


def test_rows_with_and_without_picks(form):
    q, kv, slots = inputs(form, 3)
    slots[0, 3:40] = -1
    slots[0, 60:90] = N + 5
    slots[1] = -1
    slots[2, form.picks // 2 :] = -(2**31)
    held(form, q, kv, slots)


def test_lengths(form):
    if form.lengths:
        q, kv, slots = inputs(form, 4, 1)
        held(form, q, kv, slots, torch.tensor([1, form.picks - 33, -7, form.picks + 1000], dtype=torch.int32))


def test_few_picks_that_share_the_weight(form):
    q, kv, slots = inputs(form, 2, 2)
    slots[:, ::7] = -1
    slots[1, 5:] = -1
    held(form, q * 0.05, kv, slots)


def test_what_a_launch_is_handed(monkeypatch):
    """Strided tensors; a result that cannot be written in place is copied to it."""
    launched = []

    class Kernel:
        def launch(self, grid, threads, arguments, *, pdl):
            assert threads == 384 and not pdl
            launched.append((grid, [getattr(a, "value", a) for a in arguments]))

    monkeypatch.setattr(sparse_mla_portable.program, "kernel", lambda *_, **__: Kernel())
    monkeypatch.setattr(sparse_mla_portable.index_tables, "gpu_of", lambda _: index_tables.Gpu("cuda", 80, 108, 163))
    nope = torch.zeros(70, 200, 512, dtype=torch.bfloat16).transpose(0, 1)
    rope = torch.zeros(200, 70, 192, dtype=torch.bfloat16)[..., 128:]
    slots, kv = torch.zeros(200, 300, dtype=torch.int64)[:, :256], torch.zeros(50, 576, dtype=torch.bfloat16)
    lengths = torch.full((200,), 5, dtype=torch.int32)
    wide, odd = (torch.ones(200, heads, n, dtype=torch.bfloat16) for heads, n in ((140, 600), (70, 513)))
    for out, in_place in ((wide[:, ::2, 4:516], True), (odd[..., 1:], False)):
        got, lse = sparse_mla_portable.sparse_mla(nope, kv, slots, 1.0, "bf16_1152", 1.0, None, lengths, out, rope)
        grid, given = launched.pop()
        assert got is out and grid == 200 * 2
        assert given[:6] == [*(t.data_ptr() for t in (nope, rope, kv, slots, lengths)), 0]
        assert (given[6] == out.data_ptr()) == in_place and given[7] == lse.data_ptr()
        assert given[8:14] == [*nope.stride()[:2], *rope.stride()[:2], 1152, 300]
        assert given[16:21] == [50, 70, 256, 256, 1]


@pytest.mark.parametrize("gpu", [index_tables.Gpu("cuda", 80, 108, 163), index_tables.Gpu("cuda", 86, 84, 99)])
@pytest.mark.parametrize("layout", sparse_mla_portable.LAYOUTS)
def test_splits_cover_all_picks_and_fill_the_gpu_once(layout, gpu):
    """A split has 64 picks or more, unless there are fewer, and a row's splits are no more than find a place."""
    shapes = ((1, 128, 2048), (1, 64, 2048), (1, 128, 20), (1, 128, 33), (16, 64, 2048), (300, 128, 513))
    for rows, heads, picks in shapes:
        plan = sparse_mla_portable.choose(gpu, layout, rows, heads, picks)
        assert plan.split_picks * (plan.splits - 1) < picks <= plan.split_picks * plan.splits
        assert plan.split_picks >= min(64, -(-picks // plan.tile) * plan.tile)
        assert plan.split_picks % plan.tile == 0 and plan.shared_bytes <= gpu.shared_kib << 10
        assert plan.splits == 1 or rows * plan.splits * -(-heads // plan.heads) <= gpu.processors


@pytest.mark.parametrize("layout", sparse_mla_portable.LAYOUTS)
@pytest.mark.parametrize(("sm", "shared", "tile"), [(80, 163, 32), (86, 99, 16), (89, 99, 16), (120, 99, 16)])
def test_every_gpu_from_80_on_has_a_form(layout, sm, shared, tile):
    for heads in (32, 64, 128):
        plan = sparse_mla_portable.choose(index_tables.Gpu("cuda", sm, 108, shared), layout, 64, heads, 2048)
        assert plan.tile == tile and plan.shared_bytes <= shared << 10 and plan.threads <= 65536 // 168


def test_too_little_shared_memory_is_said(monkeypatch):
    monkeypatch.setattr(sparse_mla_portable.index_tables, "gpu_of", lambda _: index_tables.Gpu("cuda", 75, 72, 64))
    q, rows = torch.zeros(2, 64, 576, dtype=torch.bfloat16), torch.zeros(N, 656, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"fp8_656 rows want more shared memory .* 64 KiB .* impl='triton'"):
        sparse_mla_portable.sparse_mla(q, rows, torch.zeros(2, 64, dtype=torch.int32), SCALE, "fp8_656")


@pytest.mark.parametrize("size", [1.0, 16.0])
def test_what_is_left_of_larger_terms(form, size):
    """Two picks whose values nearly cancel: weights of 0.6 and 0.4, values v and -1.5 v. A weight that is rounded once
    would be seen in what is left.
    """
    g = torch.Generator().manual_seed(3)
    kv, v = torch.zeros(N, 576), torch.randn(512, generator=g)
    kv[0, :512], kv[1, :512] = size * v, -1.5 * size * v
    kv[0, 512] = 1
    q = torch.zeros(1, form.heads, 576)
    q[..., 512] = math.log(1.5) / SCALE * (1 + 0.03 * torch.randn(form.heads, generator=g))
    slots = torch.full((1, form.picks), -1, dtype=torch.int32)
    slots[0, 0], slots[0, form.picks // 2] = 0, 1
    packed = (
        quant.quantize_latent(kv[:, :512], kv[:, 512:], "fp8_656", impl="torch") if form.plan.fp8 else kv.bfloat16()
    )
    held(form, q.bfloat16(), packed, slots)


def test_queries_of_every_size(form):
    """Of each head's own, and heads that are zero but in their roped part: for fp8 rows queries become f16."""
    q, kv, slots = inputs(form, 2, 6)
    sizes = torch.tensor([1e-30, 1e-6, 1e-3, 1.0, 20.0])[torch.arange(form.heads) % 5]
    q[0] *= sizes[:, None]
    q[1, ::2, :512] = 0
    q[1, 1::2, :512] *= 1e-9
    held(form, q, kv, slots)
    # Nothing but large roped parts. Splits are joined by what their lse differ in, which f32 does not hold at 10^6.
    for query, key in ((1024, -1024), (2048, -512)) if form.plan.splits == 1 else ():
        q[0, :, :512], q[0, :, 512:] = 0, query
        rope = torch.full((N, 64), key).bfloat16()
        kv.view(torch.uint8)[:, -128:] = rope.view(torch.uint8)
        held(form, q[:1], kv, slots[:1])


@pytest.mark.parametrize("size", [3.0, 30.0])
def test_maxima_that_go_up(form, size):
    q, kv, slots = inputs(form, 2, 3)
    scores = q[1].float().mean(0) @ quant.dequantize_latent(kv, "fp8_656", impl="torch").T if form.plan.fp8 else None
    scores = q[1].float().mean(0) @ kv.float().T if scores is None else scores
    slots[1] = scores[slots[1].long()].argsort()[: form.picks].int()
    held(form, q * size, kv, slots)


@pytest.mark.parametrize("size", [2.0**20, 2.0**-20, 0.0])
def test_values_that_f16_does_not_hold(form, size):
    """All of them, or one: the block goes over its picks again."""
    q, kv, slots = inputs(form, 1, 3, size)
    held(form, q * (1 / max(size, 1)), kv, slots)
    if not form.plan.fp8:
        q, kv, slots = inputs(form, 1, 3)
        kv[slots[0, form.picks // 2].long(), 100] = 2.0**17
        q[..., 100] = 0
        held(form, q, kv, slots)


@pytest.mark.parametrize("latest", [False, True])
def test_scales_of_any_kind_and_every_code(form, latest):
    if form.plan.fp8:
        q, kv, slots = inputs(form, 2, 5)
        g = torch.Generator().manual_seed(5)
        codes = torch.arange(256, dtype=torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0
        kv[5, :512] = codes.repeat(2)
        held(form, q * 0.02, kv, slots.index_fill(1, torch.tensor([4]), 5))
        scales = torch.tensor([0.3, 1.7, 0.011, 2.0**-9]) * torch.rand(N, 4, generator=g)
        which = slots[0, -1:].long() if latest else torch.arange(N)
        kv[which, 512:528] = scales.view(torch.uint8)[which]
        held(form, q * 0.02, kv, slots)


@pytest.mark.parametrize("scale", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_scale_that_is_no_number_is_seen_beside_zeros(form, scale):
    """Its product with a code of 0 is NaN."""
    if form.plan.fp8:
        q, kv, slots = inputs(form, 2, 4)
        slots[slots == 11] = 12
        slots[1, form.picks // 2] = 11
        kv[11, 128:256] = 0
        kv[11, 516:520] = torch.tensor([scale]).view(torch.uint8)
        slots, lengths = form.given(slots, None)
        out, lse = attend(form.run, form.plan, q, kv, slots, torch.zeros(form.heads) if form.sink else None, lengths)
        assert not out[0].isnan().any() and not lse[0].isnan().any()
        assert out[1].isnan().all() and lse[1].isnan().all()


def test_a_nan_is_seen_where_it_is_picked_and_nowhere_else(form):
    q, kv, slots = inputs(form, 2, 4)
    slots[slots == 11] = 12
    slots[1, form.picks // 2] = 11
    kv.view(torch.uint8)[11, 4:6] = 0xFF
    slots, lengths = form.given(slots, None)
    out, lse = attend(form.run, form.plan, q, kv, slots, torch.zeros(form.heads) if form.sink else None, lengths)
    assert not out[0].isnan().any() and not lse[0].isnan().any()
    assert out[1].isnan().any(1).all() and lse[1].isnan().all()
