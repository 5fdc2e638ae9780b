"""The work of the adapters of attention, without a GPU: stand-ins check what each kernel needs (vendor_fakes.py),
results are fp64's.

Slots are prepared by a Triton kernel, so the tests run in Triton's interpreter, in a process of their own.
"""

import math
import os
import types

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.ops import dense_mha, quant, sparse_mla
from tests.cpu.kernels import interpreted, vendor_fakes

if os.environ.get("TRITON_INTERPRET") != "1":

    @pytest.mark.full
    def test_in_the_interpreter():
        interpreted.assert_passes(__file__)

else:
    from sglang_dsa_plugin.kernels.triton import empty_rows
    from sglang_dsa_plugin.kernels.triton import slot_prefix as slot_prefix_module
    from sglang_dsa_plugin.kernels.triton.empty_rows import clear_empty_rows
    from sglang_dsa_plugin.kernels.triton.query_rows import whole_queries
    from sglang_dsa_plugin.kernels.triton.slot_prefix import slot_prefix
    from sglang_dsa_plugin.kernels.vendor import fa3, flash_mla, trtllm

    SCALE = 192**-0.5

    def generator(seed=0):
        return torch.Generator().manual_seed(seed)

    @pytest.fixture(autouse=True)
    def gpu(monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    # Slots

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize(("k", "multiple"), [(1, 1), (7, 4), (64, 64), (100, 64)])
    @pytest.mark.parametrize("fill", [-1, 0])
    @pytest.mark.parametrize("limited", [False, True])
    def test_valid_slots_come_first_in_their_order(dtype, k, multiple, fill, limited):
        slots = torch.randint(-40, 130, (9, k), generator=generator(k), dtype=dtype)
        slots[3], slots[4] = -1, 500
        lengths = torch.randint(0, k + 1, (9,), generator=generator(1)) if limited else None
        found, counts = slot_prefix(slots, 100, lengths, fill, multiple)
        assert found.dtype == counts.dtype == torch.int32 and found.shape[1] % multiple == 0
        for r, row in enumerate(slots.tolist()):
            row = row[: lengths[r]] if limited else row
            valid = [s for s in row if 0 <= s < 100]
            rest = [fill] * (found.shape[1] - len(valid))
            assert found[r].tolist() == valid + rest and counts[r] == len(valid)
        filled, same = slot_prefix(slots, 100, lengths, fill, multiple, never_empty=True)
        found[counts == 0, 0] = 0
        assert torch.equal(filled, found) and torch.equal(same, counts)

    def test_slots_of_a_view_and_of_nothing():
        wide = torch.arange(24, dtype=torch.int32).view(3, 8)
        found, counts = slot_prefix(wide[:, :5], 100)
        assert torch.equal(found, wide[:, :5]) and counts.tolist() == [5, 5, 5]
        assert slot_prefix(wide[:0], 100)[0].shape == (0, 8)

    # Attention

    def problem(layout, heads, k=100, count=200):
        q = torch.randn(7, heads, 576, generator=generator()).bfloat16()
        latent, rope = torch.randn(count, 576, generator=generator(1)).split([512, 64], dim=1)
        kv_scale = 0.02 if layout == "fp8_576" else 1.0
        rows = quant.quantize_latent(latent.bfloat16(), rope.bfloat16(), layout, kv_scale, impl="torch")
        slots = torch.randint(0, count, (7, k), generator=generator(2), dtype=torch.int32)
        slots[0, 3:40], slots[1], slots[2, 1:], slots[3, 9:] = -1, -1, -1, count + 7
        lengths = torch.full((7,), k)
        lengths[4], lengths[5] = 0, 33
        return q, rows, slots, kv_scale, lengths

    def options_of(heads, lengths):
        sink = torch.randn(heads, generator=generator(3))
        return ({}, {"sink": sink}, {"lengths": lengths}, {"lengths": lengths, "sink": sink})

    def promised(slots, lengths, count):
        """The same picks, valid ones first, with their number: rows of every kind as selection writes them."""
        return slot_prefix(slots, count, lengths)

    def agree(got, want, error):
        none = want[1] == -math.inf
        assert torch.equal(got[1] == -math.inf, none) and (got[0][none] == 0).all()
        assert torch.allclose(got[1][~none].double(), want[1][~none], atol=error, rtol=error)
        assert torch.allclose(got[0].double(), want[0], atol=error, rtol=1 / 64)

    @pytest.mark.parametrize(("heads", "k"), [(8, 100), (64, 128), (64, 100), (100, 256)])
    @pytest.mark.parametrize("given", [False, True])
    def test_flash_mla_prefill(monkeypatch, heads, k, given):
        vendor_fakes.install(monkeypatch, vendor_fakes.flash_mla([]))
        q, rows, slots, _, lengths = problem("bf16_1152", heads, k)
        before = slots.clone()
        for options in options_of(heads, lengths):
            out = torch.full((7, heads, 512), 3.0).bfloat16() if given else None
            got = flash_mla.sparse_mla(q, rows, slots, SCALE, "bf16_1152", **options, out=out)
            agree(got, sparse_mla.reference(q, rows, slots, SCALE, "bf16_1152", **options), 1e-3)
            assert got[0].is_contiguous() and (out is None or got[0] is out) and torch.equal(slots, before)

    # Layouts, adapters and the package that each calls.
    LEAN = {
        "flash_mla": ("bf16_1152", lambda: vendor_fakes.flash_mla([])),
        "flash_mla_kv": ("fp8_656", lambda: vendor_fakes.flash_mla([])),
        "fa3": ("bf16_1152", vendor_fakes.sgl_kernel),
    }

    @pytest.mark.parametrize("with_lse", [False, True])
    @pytest.mark.parametrize("sunk", [False, True])
    @pytest.mark.parametrize(("heads", "k"), [(64, 128), (8, 100)])
    @pytest.mark.parametrize("name", LEAN)
    def test_promised_slots_are_taken_as_they_are(monkeypatch, name, heads, k, sunk, with_lse):
        """No launch of ours is left where nothing has to be changed; slots of another width are widened by one."""
        layout, package = LEAN[name]
        run = {"flash_mla": flash_mla.sparse_mla, "flash_mla_kv": flash_mla.sparse_mla_packed, "fa3": fa3.sparse_mla}
        vendor_fakes.install(monkeypatch, package())
        q, rows, slots, _, lengths = problem(layout, heads, k)
        slots, lengths = promised(slots, lengths, len(rows))
        sink = torch.randn(heads, generator=generator(3)) if sunk else None
        launched = []
        for kernel in (empty_rows.empty_rows_kernel, slot_prefix_module.prefix_kernel):
            real = kernel.run
            monkeypatch.setattr(
                kernel,
                "run",
                lambda *a, _real=real, _name=kernel.__name__, **m: launched.append(_name) or _real(*a, **m),
            )
        got = run[name](q, rows, slots, SCALE, layout, sink=sink, lengths=lengths, prefix=True, with_lse=with_lse)
        want = sparse_mla.reference(q, rows, slots, SCALE, layout, sink=sink, lengths=lengths)
        agree((got[0], got[1] if with_lse else want[1]), want, 1e-3)
        assert with_lse or sunk or got[1] is None
        widened = name != "fa3" and k % 64 != 0
        settled = with_lse or (sunk and name == "fa3")
        assert launched == ["prefix_kernel"] * widened + ["empty_rows_kernel"] * settled

    @pytest.mark.parametrize(("heads", "whole"), [(1, 64), (40, 64), (64, 64), (100, 128)])
    def test_queries_in_one_piece(heads, whole):
        q = torch.randn(5, heads, 576, generator=generator()).bfloat16()
        want = torch.nn.functional.pad(q, (0, 0, 0, whole - heads))
        latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
        rope = torch.cat((q[..., :128], q[..., 512:]), dim=2)[..., 128:]
        for parts in ((q, None), (latent, rope), (q[:, :, :512], q[..., 512:])):
            got = whole_queries(*parts, whole)
            assert torch.equal(got, want) and got.is_contiguous()
            assert (got is q) == (parts[1] is None and heads == whole)
        assert torch.equal(whole_queries(q[:, ::2], None, whole)[:, : -(-heads // 2)], q[:, ::2])

    @pytest.mark.parametrize("name", ["flash_mla", "flash_mla_kv"])
    def test_flash_mla_takes_queries_in_two_parts(monkeypatch, name):
        layout, package = LEAN[name]
        vendor_fakes.install(monkeypatch, package())
        run = {"flash_mla": flash_mla.sparse_mla, "flash_mla_kv": flash_mla.sparse_mla_packed}[name]
        q, rows, slots, _, _ = problem(layout, 40)
        latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
        got = run(latent, rows, slots, SCALE, layout, q_rope=q[..., 512:])
        agree(got, sparse_mla.reference(q, rows, slots, SCALE, layout), 1e-3)

    def test_fa3_takes_queries_in_two_parts_on_any_bound(monkeypatch):
        vendor_fakes.install(monkeypatch, vendor_fakes.sgl_kernel())
        q, rows, slots, _, _ = problem("bf16_1152", 8)
        want = sparse_mla.reference(q, rows, slots, SCALE, "bf16_1152")
        latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
        agree(fa3.sparse_mla(latent, rows, slots, SCALE, "bf16_1152", q_rope=q[..., 512:]), want, 1e-3)
        off = torch.zeros(7 * 8 * 577 + 1).bfloat16()[1:].view(7, 8, 577)
        off[..., :576] = q
        agree(fa3.sparse_mla(off[..., :576], rows, slots, SCALE, "bf16_1152"), want, 1e-3)
        out = torch.full((7, 8, 512), 3.0).bfloat16()
        got = fa3.sparse_mla(q, rows, slots, SCALE, "bf16_1152", out=out, with_lse=False)
        assert got[0] is out and torch.allclose(out.double(), want[0], atol=1e-3, rtol=1 / 64)

    @pytest.mark.parametrize("heads", [1, 5, 128])
    def test_only_heads_without_a_pick_are_cleared(heads):
        out, lse = torch.full((6, heads, 512), 2.0).bfloat16(), torch.zeros(6, heads + 3)[:, :heads]
        lse[1], lse[4], lse[5, 0] = math.inf, -math.inf, math.inf
        lse[2, 0], out[3] = math.nan, math.nan
        want, none = out.masked_fill(lse.isinf().unsqueeze(2), 0), lse.isinf()
        clear_empty_rows(out, lse)
        assert torch.equal(out.nan_to_num(7), want.nan_to_num(7)) and torch.equal(lse == -math.inf, none)
        assert lse[2, 0].isnan() and not lse[0].any()
        out, lse = torch.full((6, heads, 512), 2.0).bfloat16(), torch.ones(6, heads + 3)[:, :heads]
        lse[1] = math.inf
        clear_empty_rows(out, lse, torch.tensor([3, 1, 0, 7, 0, 2], dtype=torch.int32))
        empty = torch.tensor([False, False, True, False, True, False])
        assert (out[empty] == 0).all() and (out[~empty] == 2).all()
        assert (lse[empty] == -math.inf).all() and (lse[1] == math.inf).all() and (lse[3] == 1).all()

    @pytest.mark.parametrize("heads", [1, 5, 128])
    @pytest.mark.parametrize("counted", [False, True])
    def test_a_sink_comes_in_with_the_same_launch(heads, counted):
        out, lse = torch.randn(6, heads, 512, generator=generator()).bfloat16(), torch.randn(6, heads)
        sink = torch.randn(heads, generator=generator(1))
        sink[0] = math.inf
        want = (out.float() * torch.sigmoid(lse - sink).unsqueeze(2)).bfloat16()
        out[2], lse[2], want[2] = math.nan, 3.0 if counted else math.inf, 0
        kept = lse.clone()
        clear_empty_rows(out, lse, torch.tensor([3, 1, 0, 7, 9, 2], dtype=torch.int32) if counted else None, sink)
        assert torch.allclose(out.float(), want.float(), rtol=2**-7, atol=1e-6) and not out[2].any()
        kept[2] = -math.inf
        assert torch.equal(lse, kept)

    @pytest.mark.parametrize("without_keys", [math.inf, -math.inf])
    @pytest.mark.parametrize("given", [False, True])
    def test_fa3_dense(monkeypatch, given, without_keys):
        vendor_fakes.install(monkeypatch, vendor_fakes.sgl_kernel(without_keys))
        cu_q, cu_k = torch.tensor([0, 5, 6, 20]), torch.tensor([0, 5, 35, 45])  # the last one has fewer keys
        q, k = (torch.randn(n, 8, 192, generator=generator(n)).bfloat16() for n in (20, 45))
        v = torch.randn(45, 8, 128, generator=generator()).bfloat16()
        out = torch.full((20, 8, 128), 3.0).bfloat16() if given else None
        got = fa3.dense_mha(q, k, v, cu_q, cu_k, SCALE, out)
        agree(got, dense_mha.reference(q, k, v, cu_q, cu_k, SCALE), 1e-3)
        assert out is None or got[0] is out
        alone = fa3.dense_mha(q, k, v, cu_q, cu_k, SCALE, out, with_lse=False)
        assert alone[1] is None and torch.equal(alone[0], got[0])
        nothing = fa3.dense_mha(q, k[:0], v[:0], cu_q, cu_k * 0, SCALE, out)
        assert nothing[0].shape == (20, 8, 128) and not nothing[0].any() and (nothing[1] == -math.inf).all()

    @pytest.mark.parametrize("heads", [8, 64, 100])
    def test_flash_mla_packed_rows(monkeypatch, heads):
        calls = []
        vendor_fakes.install(monkeypatch, vendor_fakes.flash_mla(calls))
        q, rows, slots, _, lengths = problem("fp8_656", heads)
        for options in options_of(heads, lengths):
            got = flash_mla.sparse_mla_packed(q, rows, slots, SCALE, "fp8_656", **options)
            agree(got, sparse_mla.reference(q, rows, slots, SCALE, "fp8_656", **options), 1e-3)
        assert {shape for _, shape, _ in calls} == {(7, 1, 128)}
        assert len({id(schedule) for schedule, _, _ in calls}) == 1, "one schedule for a shape"

    def test_a_schedule_made_while_a_graph_is_recorded_is_its_own(monkeypatch):
        calls = []
        vendor_fakes.install(monkeypatch, vendor_fakes.flash_mla(calls))
        monkeypatch.setattr(flash_mla, "_schedules", {})
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        made = [flash_mla._schedule(torch.device("cpu"), 3, 64, 128) for _ in range(2)]
        assert made[0] is not made[1]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        kept = flash_mla._schedule(torch.device("cpu"), 3, 64, 128)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert flash_mla._schedule(torch.device("cpu"), 3, 64, 128) is kept
        assert flash_mla._schedule(torch.device("cpu"), 4, 64, 128) is not kept

    def first_prefill(monkeypatch):
        """(the device, the schedule of a prefill that is the first of this process)."""
        vendor_fakes.install(monkeypatch, vendor_fakes.flash_mla([]))
        monkeypatch.setattr(flash_mla, "_schedules", {})
        monkeypatch.setattr(flash_mla, "_prefill_schedules", type(flash_mla._prefill_schedules)())
        where = torch.device("cpu")
        return where, flash_mla._schedule(where, 1000, 64, 2048)

    def test_a_prefills_schedule_that_a_graph_uses_is_kept_for_good(monkeypatch):
        where, first = first_prefill(monkeypatch)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert flash_mla._schedule(where, 1000, 64, 2048) is first
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for rows in range(1001, 1002 + flash_mla._PREFILLS_KEPT):
            flash_mla._schedule(where, rows, 64, 2048)
        assert flash_mla._schedule(where, 1000, 64, 2048) is first

    def test_layers_of_a_prefill_share_a_schedule_and_the_last_few_are_kept(monkeypatch):
        where, first = first_prefill(monkeypatch)
        assert flash_mla._schedule(where, 1000, 64, 2048) is first
        for rows in range(1001, 1001 + flash_mla._PREFILLS_KEPT):
            flash_mla._schedule(where, rows, 64, 2048)
        assert len(flash_mla._prefill_schedules) == flash_mla._PREFILLS_KEPT and not flash_mla._schedules
        assert flash_mla._schedule(where, 1000, 64, 2048) is not first

    @pytest.mark.parametrize("without_picks", [math.inf, -math.inf])
    @pytest.mark.parametrize("heads", [8, 128])
    def test_fa3_rows_as_pages(monkeypatch, heads, without_picks):
        vendor_fakes.install(monkeypatch, vendor_fakes.sgl_kernel(without_picks))
        q, rows, slots, _, lengths = problem("bf16_1152", heads)
        for options in options_of(heads, lengths):
            got = fa3.sparse_mla(q, rows, slots, SCALE, "bf16_1152", **options)
            agree(got, sparse_mla.reference(q, rows, slots, SCALE, "bf16_1152", **options), 1e-3)

    def test_fa3s_schedule_is_made_once_a_recording(monkeypatch):
        """A counter lies in it: neither eager calls nor another graph or stream may share it."""
        seen = []
        vendor_fakes.install(monkeypatch, vendor_fakes.sgl_kernel(schedules=seen))
        monkeypatch.setattr(fa3, "_recorded", {})
        monkeypatch.setattr(fa3, "_recording", None)
        now = types.SimpleNamespace(cuda_stream=7)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: now)
        monkeypatch.setattr(fa3, "_recording_of", lambda stream: number)
        q, rows, slots, _, _ = problem("bf16_1152", 8, k=1024)

        def used(heads=8, picks=1024):
            seen.clear()
            fa3.sparse_mla(q[:, :heads], rows, slots[:, :picks], SCALE, "bf16_1152", with_lse=False)
            return seen[-1], "made" in seen

        number = 1
        assert used() == (None, False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        first, made = used()
        assert made and first is not None and used() == (first, False)
        other, made = used(heads=4)
        assert made and other is not first and used() == (first, False)
        assert used(picks=1023) == (None, False), "rows that are not split do not bring it back"
        now.cuda_stream = 8
        assert used()[1] and not used()[1]
        now.cuda_stream = 7
        assert used() == (first, False)
        number = 2
        assert used()[1] and used()[0] is not first
        number = None
        assert used() == (None, False)

    @pytest.mark.parametrize("layout", ["bf16_1152", "fp8_576"])
    def test_trtllm(monkeypatch, layout):
        """Queries that e4m3 holds: rounding them is the one thing the adapter adds to fp8 rows."""
        vendor_fakes.install(monkeypatch, vendor_fakes.flashinfer())
        monkeypatch.setattr(trtllm, "_WORKSPACE_BYTES", 2 * 16 * trtllm._SOFTMAX_BYTES)
        monkeypatch.setattr(trtllm, "_SCRATCH_BYTES", 0)  # two rows a call
        q, rows, slots, kv_scale, lengths = problem(layout, 16, k=99)
        q = (q / 4).to(FP8).bfloat16() if layout == "fp8_576" else q
        for options in options_of(16, lengths):
            got = trtllm.sparse_mla(q, rows, slots, SCALE, layout, kv_scale, **options)
            agree(got, sparse_mla.reference(q, rows, slots, SCALE, layout, kv_scale, **options), 1e-3)

    @pytest.mark.parametrize("run", [flash_mla.sparse_mla_packed, fa3.sparse_mla, trtllm.sparse_mla])
    def test_nothing_to_attend_to(run):
        out, lse = run(torch.zeros(2, 8, 576).bfloat16(), torch.zeros(0, 576), torch.zeros(2, 4).int(), 1.0, "")
        assert out.shape == (2, 8, 512) and not out.any() and (lse == -math.inf).all()
