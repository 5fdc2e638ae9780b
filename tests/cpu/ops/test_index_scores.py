"""ops.index_scores against the formula in fp64."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.kernels.torch_impl import index_scores as torch_scores
from sglang_dsa_plugin.kernels.torch_impl import matmul, quant
from sglang_dsa_plugin.ops import index_scores, index_select

from .indexer_inputs import DTYPES, generator, normal


def _close(got, want, inputs, windows):
    """Same -inf, and elsewhere an error of f32 rounding; windows[r] is the slice or index of row r's keys."""
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    for r, keys in enumerate(windows):
        size = inputs.term_size(keys, slice(r, r + 1))[0]
        error = (got[r, : len(size)].double() - want[r, : len(size)]).abs()
        assert (error <= 1e-6 * size + 1e-30).all()


def _table(inputs, requests, seed=0):
    """Random pages for each request: the table, and the keys of a request in its order."""
    count = len(inputs.k) // 64
    table = torch.stack([torch.randperm(count, generator=generator(seed + i)) for i in range(requests)])
    return table.int(), (table.unsqueeze(-1) * 64 + torch.arange(64)).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 16, 64])
def test_ragged_windows(dtype, heads):
    inputs = normal(8, heads, 384, dtype)
    start = torch.tensor([0, 0, 5, 5, 101, 0, 3, 64], dtype=torch.int32)
    end = torch.tensor([1, 384, 5, 197, 300, 64, 66, 193], dtype=torch.int32)
    got = index_scores.ragged(inputs.q, inputs.k, inputs.k_scale, inputs.gate, start, end)
    want = index_scores.reference_ragged(inputs.q, inputs.k, inputs.k_scale, inputs.gate, start, end)
    assert got.shape == (8, 384)
    _close(got, want, inputs, [slice(s, e) for s, e in zip(start.tolist(), end.tolist())])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 16, 64])
def test_paged_windows(dtype, heads):
    inputs = normal(8, heads, 384, dtype)
    table, keys = _table(inputs, 3)
    requests = torch.tensor([0, 0, 2, 1, 1, 2, 2, 0])
    lengths = torch.tensor([384, 1, 0, 63, 64, 65, 191, 193])
    args = inputs.q, inputs.pages, inputs.gate, lengths, table, requests
    want = index_scores.reference_paged(*args)
    windows = [keys[b, :n] for b, n in zip(requests.tolist(), lengths.tolist())]
    _close(index_scores.paged(*args), want, inputs, windows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_mixed_prefill_batch(dtype):  # sgl-project/sglang#12583: one offset for two things
    """Three requests with prefixes 0, 130, 3000 and 5, 64, 1 new tokens: each row sees its own request's keys only."""
    prefixes, extends = [0, 130, 3000], [5, 64, 1]
    inputs = normal(sum(extends), 4, 3264, dtype)
    start, end, base = [], [], 0
    for prefix, extend in zip(prefixes, extends):
        for i in range(extend):
            start.append(base)
            end.append(base + prefix + i + 1)
        base += prefix + extend
    got = index_scores.ragged(inputs.q, inputs.k, inputs.k_scale, inputs.gate, torch.tensor(start), torch.tensor(end))
    want = index_scores.reference_ragged(
        inputs.q, inputs.k, inputs.k_scale, inputs.gate, torch.tensor(start), torch.tensor(end)
    )
    assert got.shape == (70, 3001)
    _close(got, want, inputs, [slice(s, e) for s, e in zip(start, end)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 4, 64])
def test_a_score_depends_on_its_row_and_key_alone(dtype, heads):
    """Alone or in company, from pages or a buffer, from any start: the same bits, so the same picks."""
    inputs = normal(21, heads, 1280, dtype)
    table = torch.arange(20, dtype=torch.int32).unsqueeze(0)
    rows = torch.arange(21)
    end = 1260 + rows
    whole = index_scores.ragged(inputs.q, inputs.k, inputs.k_scale, inputs.gate, rows * 0, end)
    paged = index_scores.paged(inputs.q, inputs.pages, inputs.gate, end, table, rows * 0)
    assert torch.equal(whole, paged)
    for r in (0, 7, 20):
        one = inputs.q[r : r + 1], inputs.k, inputs.k_scale, inputs.gate[r : r + 1]
        for s, e in ((0, 1), (0, 1260), (3, 67), (130, 1131), (1000, 1002)):
            alone = index_scores.ragged(*one, torch.tensor([s]), torch.tensor([e]))
            assert torch.equal(alone[0], whole[r, s:e])
    few = index_scores.ragged(
        inputs.q[5:8],
        inputs.k,
        inputs.k_scale,
        inputs.gate[5:8],
        torch.tensor([9, 9, 9]),
        torch.tensor([99, 500, 1111]),
    )
    assert torch.equal(few[2], whole[7, 9:1111])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_agree(dtype, monkeypatch):
    inputs = normal(9, 8, 448, dtype)
    args = inputs.q, inputs.k, inputs.k_scale, inputs.gate, torch.arange(9) // 4, 440 + torch.arange(9)
    want = index_scores.ragged(*args)
    for dots, elements, keys in ((8, 8 * 64, 64), (16, 16 * 128, 4096), (64, 1 << 20, 128)):
        monkeypatch.setattr(torch_scores, "_BLOCK_DOTS", dots)
        monkeypatch.setattr(torch_scores, "_BLOCK_ELEMENTS", elements)
        monkeypatch.setattr(torch_scores, "_MAX_KEYS", keys)
        assert torch.equal(index_scores.ragged(*args), want)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_heads_by_rows_by_keys_is_never_built():  # huggingface/transformers#48788
    inputs = normal(64, 16, 8192, torch.bfloat16)
    rows = torch.zeros(64, dtype=torch.int32)
    table = torch.arange(128, dtype=torch.int32).unsqueeze(0)
    for run in (
        lambda: index_scores.ragged(inputs.q, inputs.k, None, inputs.gate, rows, rows + 8192),
        lambda: index_scores.paged(inputs.q, inputs.pages, inputs.gate, rows + 8192, table, rows),
    ):
        with _Largest() as largest:
            run()
        assert largest.elements <= 1 << 20  # 16 x 64 x 8192 would be 1 << 23


def test_causal_tiles_past_every_window_are_skipped(monkeypatch):
    seen = 0
    inner = torch_scores._score_tile

    def counting(q, gate, keys, *rest):
        nonlocal seen
        seen += q.shape[0] * keys.shape[0]
        return inner(q, gate, keys, *rest)

    monkeypatch.setattr(torch_scores, "_score_tile", counting)
    inputs = normal(2048, 1, 2048)
    rows = torch.arange(2048)
    index_scores.ragged(inputs.q, inputs.k, None, inputs.gate, rows * 0, rows + 1)
    assert seen <= 0.8 * 2048 * 2048


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_reaches_its_own_scores_only(dtype):
    inputs = normal(4, 4, 192, dtype)
    bad_key, bad_row = inputs.k.clone(), inputs.q.clone()
    for tensor, at in ((bad_key, (70, 5)), (bad_row, (2, 1, 127))):
        raw = tensor.float()
        raw[at] = torch.nan
        tensor.copy_(raw.to(dtype))
    start, end = torch.zeros(4, dtype=torch.long), torch.tensor([192, 71, 70, 192])
    got = index_scores.ragged(inputs.q, bad_key, inputs.k_scale, inputs.gate, start, end)
    assert got.isnan().nonzero().tolist() == [[0, 70], [1, 70], [3, 70]]
    got = index_scores.ragged(bad_row, inputs.k, inputs.k_scale, inputs.gate, start, end)
    assert got.isnan().any(1).tolist() == [False, False, True, False]
    assert got[2, :70].isnan().all() and (got[2, 70:] == -torch.inf).all()


def test_every_e4m3_byte_is_read_right():
    values = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = values[~values.float().isnan()]
    assert torch.equal(quant.widen_e4m3(numbers), numbers.float())
    assert torch.equal(quant.widen_e4m3(values).isnan(), values.float().isnan())
    assert float(quant.widen_e4m3(numbers).abs().max()) == 448.0
    if torch.set_flush_denormal(True):
        try:
            assert torch.equal(quant.widen_e4m3(numbers), numbers.float())
        finally:
            torch.set_flush_denormal(False)


def test_junk_past_the_length_is_not_seen():
    inputs = normal(2, 4, 192)
    pages = inputs.pages.clone()
    pages[1, 7:] = torch.nan
    table = torch.tensor([[2, 1, -1], [1, 10**6, -5]], dtype=torch.int32)
    args = inputs.q, pages, inputs.gate, torch.tensor([71, 7]), table, torch.tensor([0, 1])
    got = index_scores.paged(*args)
    assert got.shape == (2, 71) and not got.isnan().any() and (got[1, 7:] == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_slices_of_wider_tensors(dtype):
    inputs = normal(3, 4, 192, dtype)
    start, end = torch.tensor([0, 10, 50]), torch.tensor([150, 190, 64])
    want = index_scores.ragged(inputs.q, inputs.k, inputs.k_scale, inputs.gate, start, end)
    raw_q, raw_k = (x.view(torch.uint8 if dtype == FP8 else dtype) for x in (inputs.q, inputs.k))
    q = torch.cat((raw_q, raw_q, raw_q), dim=-1)[..., 128:256].view(dtype)
    k = torch.cat((raw_k, raw_k, raw_k), dim=-1)[..., 128:256].view(dtype)
    gate = torch.cat((inputs.gate, inputs.gate), dim=-1)[:, 4:]
    assert torch.equal(index_scores.ragged(q, k, inputs.k_scale, gate, start, end), want)


@pytest.mark.parametrize("width", [0, 1, 65, 150, 300])
def test_width(width):
    inputs = normal(3, 4, 192)
    start, end = torch.tensor([0, 10, 50]), torch.tensor([150, 190, 50])
    args = inputs.q, inputs.k, None, inputs.gate, start, end
    got = index_scores.ragged(*args, width=width)
    natural = index_scores.ragged(*args)
    assert natural.shape == (3, 180) and got.shape == (3, width)
    common = min(width, 180)
    assert torch.equal(got[:, :common], natural[:, :common]) and (got[:, common:] == -torch.inf).all()
    table = torch.arange(3, dtype=torch.int32).unsqueeze(0)
    paged = index_scores.paged(inputs.q, inputs.pages, inputs.gate, end, table, start * 0, width=width)
    assert paged.shape == (3, width) and torch.equal(paged[0, :common], natural[0, :common])


def test_nothing_to_score():
    inputs = normal(3, 4, 64)
    none = torch.zeros(3, dtype=torch.int32)
    assert index_scores.ragged(inputs.q, inputs.k, None, inputs.gate, none, none).shape == (3, 0)
    assert (
        index_scores.ragged(inputs.q, inputs.k[:0], None, inputs.gate, none, none, width=2).tolist()
        == [[-math.inf] * 2] * 3
    )
    assert index_scores.ragged(inputs.q[:0], inputs.k, None, inputs.gate[:0], none[:0], none[:0]).shape == (0, 0)
    table = torch.zeros(1, 0, dtype=torch.int32)
    assert index_scores.paged(inputs.q, inputs.pages[:0], inputs.gate, none, table, none).shape == (3, 0)
    assert index_scores.paged(
        inputs.q[:0], inputs.pages, inputs.gate[:0], none[:0], table, none[:0], width=3
    ).shape == (0, 3)
    backwards = index_scores.ragged(inputs.q, inputs.k, None, inputs.gate, none + 9, none + 3, width=1)
    assert (backwards == -torch.inf).all()


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_precision_switch_of_the_process_costs_no_accuracy(precision, dtype):
    inputs = normal(3, 16, 192, dtype)
    start, end = torch.zeros(3, dtype=torch.long), torch.tensor([192, 100, 65])
    args = inputs.q, inputs.k, inputs.k_scale, inputs.gate, start, end
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert not matmul.plain_f32(torch.device("cpu"))
        got = index_scores.ragged(*args)
    finally:
        torch.set_float32_matmul_precision(before)
    _close(got, index_scores.reference_ragged(*args), inputs, [slice(0, int(e)) for e in end])


def _ragged(**change):
    inputs = normal(4, 2, 64, change.pop("dtype", torch.float32))
    good = {"q": inputs.q, "k": inputs.k, "k_scale": inputs.k_scale, "gate": inputs.gate}
    good |= {"start": torch.zeros(4, dtype=torch.int32), "end": torch.full((4,), 64, dtype=torch.int32)}
    return index_scores.ragged(**{**good, **change})


def test_without_a_start_windows_begin_at_the_first_key():
    end = torch.tensor([0, 1, 40, 64], dtype=torch.int32)
    got = _ragged(start=None, end=end)
    assert torch.equal(got, _ragged(end=end)) and torch.equal(got == -torch.inf, torch.arange(64) >= end.unsqueeze(1))
    inputs = normal(4, 2, 64, torch.float32)
    args = (inputs.q, inputs.k, inputs.k_scale, inputs.gate, None, end)
    assert torch.allclose(got.double(), index_scores.reference_ragged(*args), atol=1e-4)
    picks = index_select.ragged(*args, 8)
    assert torch.equal(picks, index_select.ragged(*args[:4], torch.zeros_like(end), end, 8))
    assert torch.equal(picks, index_select.reference_ragged(*args, 8))


@pytest.mark.parametrize(
    "change, argument",
    [
        ({"q": torch.zeros(4, 2, 64)}, "q"),
        ({"q": torch.zeros(4, 0, 128)}, "q"),
        ({"q": torch.zeros(4, 2, 128, dtype=torch.float64)}, "q"),
        ({"k": torch.zeros(64, 128, dtype=torch.bfloat16)}, "k"),
        ({"k_scale": torch.ones(64)}, "k_scale"),
        ({"dtype": FP8, "k_scale": None}, "k_scale"),
        ({"dtype": FP8, "k_scale": torch.ones(63)}, "k_scale"),
        ({"gate": torch.zeros(4, 3)}, "gate"),
        ({"gate": torch.zeros(3, 2)}, "gate"),
        ({"gate": torch.zeros(4, 2, dtype=torch.bfloat16)}, "gate"),
        ({"start": torch.zeros(3, dtype=torch.int32)}, "start"),
        ({"start": torch.tensor([0, 0, 0, -1])}, "start"),
        ({"end": torch.zeros(5, dtype=torch.int32)}, "end"),
        ({"end": torch.tensor([0, 0, 0, 65])}, "end"),
        ({"width": -1}, "width"),
    ],
)
def test_bad_ragged_input_is_named(change, argument):
    with pytest.raises(ValueError, match=rf"index_scores\.ragged: {argument} must be"):
        _ragged(**change)


@pytest.mark.parametrize(
    "change, argument",
    [
        ({"pages": torch.zeros(3, 8448, dtype=torch.uint8)}, "pages"),
        ({"pages": torch.zeros(3, 32, 128)}, "pages"),
        ({"q": torch.zeros(4, 2, 128).to(FP8)}, "pages"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths"),
        ({"lengths": torch.tensor([0, 0, 0, 193])}, "lengths"),
        ({"lengths": torch.tensor([0, 0, 0, -1])}, "lengths"),
        ({"page_table": torch.zeros(3, dtype=torch.int32)}, "page_table"),
        ({"row_to_request": torch.tensor([0, 0, 0, 2])}, "row_to_request"),
        ({"row_to_request": torch.tensor([0, 0, 0, -1])}, "row_to_request"),
        ({"row_to_request": torch.zeros(4)}, "row_to_request"),
    ],
)
def test_bad_paged_input_is_named(change, argument):
    inputs = normal(4, 2, 192)
    good = {"q": inputs.q, "pages": inputs.pages, "gate": inputs.gate, "lengths": torch.full((4,), 192)}
    good |= {"page_table": torch.zeros(2, 3, dtype=torch.int32), "row_to_request": torch.zeros(4, dtype=torch.int32)}
    with pytest.raises(ValueError, match=rf"index_scores\.paged: {argument} must be"):
        index_scores.paged(**{**good, **change})
