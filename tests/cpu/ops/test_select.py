"""ops.select: the picks are one value, bit for bit, on scores that have gone wrong elsewhere."""

import math

import pytest
import torch

from sglang_dsa_plugin.kernels.torch_impl import select as torch_select
from sglang_dsa_plugin.ops import select


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _everywhere(scores, lengths, k, starts=None, init=0, local=0):
    """The CPU path and the one for other devices, which is plain torch too; both must agree."""
    got = select.topk(scores, lengths, k, starts, init, local)
    assert got.dtype == torch.int32 and got.shape == (scores.shape[0], k)
    if starts is None and not init and not local:
        assert torch.equal(torch_select._topk_device(scores, lengths, k), got)
    return got


def _row(*values):
    return torch.tensor([values], dtype=torch.float32)


@pytest.mark.parametrize("k", [64, 512, 1024, 2048])
def test_every_length_around_k(k):  # sgl-project/sglang#40449
    lengths = torch.tensor([1, 63, k - 1, k, k + 1, 0, 64, 65, 127, k + 64, k + 63])
    scores = torch.randn(len(lengths), k + 64, generator=_generator(k))
    assert torch.equal(_everywhere(scores, lengths, k), select.reference(scores, lengths, k))
    for r, length in enumerate(lengths.tolist()):  # a row alone picks as in company
        alone = _everywhere(scores[r : r + 1, : max(length, 1)], lengths[r : r + 1], k)
        assert torch.equal(alone, select.reference(scores[r : r + 1], lengths[r : r + 1], k))


@pytest.mark.parametrize("levels", [1, 2, 3, 17, 1000])
@pytest.mark.parametrize("rows, width, k", [(1, 200, 64), (9, 333, 17), (40, 1025, 512)])
def test_ties_go_to_the_lowest_position(levels, rows, width, k):
    scores = torch.randint(0, levels, (rows, width), generator=_generator(levels)).float() - 1
    lengths = torch.randint(0, width + 1, (rows,), generator=_generator(1))
    lengths[0] = width
    assert torch.equal(_everywhere(scores, lengths, k), select.reference(scores, lengths, k))


@pytest.mark.parametrize("length", [2049, 3000, 8320])
def test_plateau_of_zeros_below_a_few_winners(length):  # sgl-project/sglang#30645
    scores = torch.zeros(1, length)
    winners = torch.randperm(length, generator=_generator())[:100]
    scores[0, winners] = torch.rand(100, generator=_generator(1)) + 0.5
    got = _everywhere(scores, torch.tensor([length]), 2048)
    assert torch.equal(got, select.reference(scores, torch.tensor([length]), 2048))
    assert got.min() >= 0 and len(got.unique()) == 2048 and set(winners.tolist()) <= set(got[0].tolist())


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, math.inf, -math.inf, math.nan])
def test_equal_rows_pick_the_first_k(value):
    got = _everywhere(torch.full((3, 100), value), torch.tensor([100, 70, 30]), 64)
    assert torch.equal(got[:2], torch.arange(64, dtype=torch.int32).expand(2, 64))
    assert got[2].tolist() == [*range(30), *[-1] * 34]


def test_nan_comes_after_minus_infinity():  # vllm-project/vllm#49896
    nan, inf = math.nan, math.inf
    scores = _row(nan, -inf, 0.0, nan, -inf, 5.0, nan)
    want = {1: [5], 2: [2, 5], 3: [1, 2, 5], 4: [1, 2, 4, 5], 5: [0, 1, 2, 4, 5], 6: [0, 1, 2, 3, 4, 5]}
    for k, picks in want.items():
        assert _everywhere(scores, torch.tensor([7]), k).tolist() == [picks]


def test_every_nan_is_equal_whatever_its_bits():
    bits = torch.tensor([[0x7FC00000, -1, 0x7F800001, -0x400000, 0x7FFFFFFF, -0x7FFFFF]], dtype=torch.int32)
    scores = bits.view(torch.float32)
    assert scores.isnan().all()
    assert _everywhere(scores, torch.tensor([6]), 4).tolist() == [[0, 1, 2, 3]]
    mixed = torch.cat((scores, _row(-math.inf)), 1)
    assert _everywhere(mixed, torch.tensor([7]), 2).tolist() == [[0, 6]]


def test_negative_zero_equals_zero():
    assert _everywhere(_row(-0.0, 0.0, -0.0, 0.0), torch.tensor([4]), 2).tolist() == [[0, 1]]
    assert _everywhere(_row(-1e-45, -0.0, 0.0, 1e-45), torch.tensor([4]), 2).tolist() == [[1, 3]]


def test_denormals_count_also_when_the_process_flushes_them():
    scores = torch.randint(-300, 300, (5, 400), generator=_generator()).int()
    scores = torch.where(scores < 0, -(2**31) - scores, scores).int().view(torch.float32)  # multiples of 2^-149
    lengths = torch.tensor([400, 399, 200, 65, 64])
    want = select.reference(scores, lengths, 64)
    assert torch.equal(_everywhere(scores, lengths, 64), want)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        assert torch.equal(_everywhere(scores, lengths, 64), want)
    finally:
        torch.set_flush_denormal(False)


def test_scores_that_differ_in_the_low_bits_only():  # tile-ai/tilelang#1351
    bits = torch.randint(0, 1024, (4, 3000), generator=_generator()).int() | 0x3F800000
    scores, lengths = bits.view(torch.float32), torch.tensor([3000, 2999, 2500, 2049])
    for sign in (1, -1):
        assert torch.equal(_everywhere(sign * scores, lengths, 2048), select.reference(sign * scores, lengths, 2048))


def test_repeats_give_one_set():  # sgl-project/sglang#31115
    scores = torch.randint(0, 4, (8, 2500), generator=_generator()).float()
    lengths = torch.full((8,), 2500)
    first = _everywhere(scores, lengths, 2048)
    assert all(torch.equal(_everywhere(scores, lengths, 2048), first) for _ in range(25))


@pytest.mark.parametrize(
    "init, local", [(0, 0), (4, 0), (0, 9), (3, 70), (64, 1), (200, 5), (10, 54), (60, 200), (1, 62)]
)
@pytest.mark.parametrize("levels", [2, 10**6])
@pytest.mark.parametrize("shifted", [False, True])
def test_forced_tokens_and_starts(init, local, levels, shifted):
    rows, width, k = 11, 260, 64
    scores = torch.randint(0, levels, (rows, width), generator=_generator(levels)).float()
    scores[3, 10:30] = torch.nan
    scores[4] = torch.inf
    starts = torch.randint(0, 90, (rows,), generator=_generator(1)) if shifted else None
    room = width - (starts if shifted else torch.zeros(rows, dtype=torch.long))
    lengths = (room * torch.rand(rows, generator=_generator(2))).long()
    lengths[:5] = room[:5]
    lengths[5], lengths[6], lengths[7] = 0, k, k + 1
    got = _everywhere(scores, lengths, k, starts, init, local)
    assert torch.equal(got, select.reference(scores, lengths, k, starts, init, local))
    as_int32 = select.topk(scores, lengths.int(), k, None if starts is None else starts.int(), init, local)
    assert torch.equal(as_int32, got)


def test_forced_tokens_by_hand():
    scores, length = torch.arange(10.0).unsqueeze(0), torch.tensor([10])
    assert _everywhere(scores, length, 4, None, 1, 2).tolist() == [[0, 7, 8, 9]]
    assert _everywhere(scores, length, 4, None, 3, 9).tolist() == [[0, 1, 2, 9]]  # init first, then the latest
    assert _everywhere(scores, length, 4, None, 9, 9).tolist() == [[0, 1, 2, 3]]
    assert _everywhere(-scores, length, 4, None, 0, 2).tolist() == [[0, 1, 8, 9]]


def test_scores_outside_the_window_never_count():
    scores = torch.full((2, 300), torch.nan)
    scores[:, :100] = torch.inf
    scores[:, 100:190] = torch.randn(2, 90, generator=_generator())
    starts, lengths = torch.tensor([100, 100]), torch.tensor([90, 90])
    want = select.reference(scores[:, 100:190], lengths, 64)
    assert torch.equal(select.topk(scores, lengths, 64, starts), want)
    assert torch.equal(select.topk(scores[:, 100:], lengths, 64), want)


def test_tiles_of_rows_agree(monkeypatch):
    scores = torch.randint(0, 50, (23, 200), generator=_generator()).float()
    lengths = torch.arange(23) * 8 + 10
    want = select.reference(scores, lengths, 64)
    for elements in (1, 200 * 3, 1 << 20):
        monkeypatch.setattr(torch_select, "_TILE_ELEMENTS", elements)
        monkeypatch.setattr(torch_select, "_TILE_ELEMENTS_CUDA", elements)
        assert torch.equal(_everywhere(scores, lengths, 64), want)


def test_offsets_past_two_to_the_31():  # NVIDIA/cudnn-frontend#311
    scores = torch.randn(1, 262_209, generator=_generator()).expand(8200, -1)  # 2.15e9 elements, one row of memory
    lengths = torch.zeros(8200, dtype=torch.int32)
    lengths[[0, 8191, 8199]] = 262_209
    got = select.topk(scores, lengths, 32)
    want = select.reference(scores[:1], lengths[:1], 32)[0]
    assert all(torch.equal(got[r], want) for r in (0, 8191, 8199))
    assert int((got >= 0).sum()) == 3 * 32


def test_no_rows_and_no_columns():
    assert select.topk(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int32), 3).shape == (0, 3)
    for starts in (None, torch.zeros(2, dtype=torch.int32)):
        assert (select.topk(torch.zeros(2, 0), torch.zeros(2, dtype=torch.int32), 3, starts) == -1).all()


def test_slots_and_offsets():
    scores = torch.randn(5, 300, generator=_generator())
    lengths = torch.tensor([300, 65, 64, 10, 0], dtype=torch.int32)
    table = torch.stack([torch.randperm(9, generator=_generator(i))[:5] for i in range(3)]).int()
    requests = torch.tensor([2, 0, 1, 2, 1])
    picks = select.topk(scores, lengths, 64)
    slots = select.topk_slots(scores, lengths, 64, table, requests)
    assert slots.dtype == torch.int32
    assert torch.equal(slots, select.reference_slots(picks, table, requests))
    assert torch.equal(select.positions_to_slots(picks.long(), table, requests.int()), slots)
    assert torch.equal(
        select.positions_to_slots(picks, table.repeat(1, 100), requests, 3),
        select.reference_slots(picks, table.repeat(1, 100), requests, 3),
    )
    offsets = torch.tensor([0, 1000, 7, 100000, 5])
    want = torch.where(picks < 0, -1, picks + offsets.unsqueeze(1)).int()
    assert torch.equal(select.topk_ragged(scores, lengths, 64, offsets), want)
    forced = select.topk(scores, lengths, 64, None, 3, 4)
    assert torch.equal(
        select.topk_slots(scores, lengths, 64, table, requests, init_tokens=3, local_tokens=4),
        select.reference_slots(forced, table, requests),
    )


def test_table_entries_past_the_length_are_never_used():
    table = torch.tensor([[3, -1, 2**31 - 1]], dtype=torch.int32)
    picks = torch.tensor([[0, 63, -1, -1]], dtype=torch.int32)
    assert select.positions_to_slots(picks, table, torch.tensor([0])).tolist() == [[192, 255, -1, -1]]
    assert (select.positions_to_slots(picks[:, 2:], table[:, :0], torch.tensor([0])) == -1).all()


@pytest.mark.parametrize(
    "change, argument",
    [
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths"),  # sgl-project/sglang#11409
        ({"lengths": torch.zeros(4)}, "lengths"),
        ({"lengths": torch.tensor([1, 2, 3, 11])}, r"starts \+ lengths"),
        ({"lengths": torch.tensor([1, 2, 3, -1])}, "lengths"),
        ({"starts": torch.tensor([0, 0, 0, 5])}, r"starts \+ lengths"),
        ({"starts": torch.tensor([0, 0, 0, -1])}, "starts"),
        ({"scores": torch.zeros(4, 10, dtype=torch.float64)}, "scores"),
        ({"scores": torch.zeros(10)}, "scores"),
        ({"k": 0}, "k"),
        ({"init_tokens": -1}, "init_tokens"),
        ({"local_tokens": 1.5}, "local_tokens"),
    ],
)
def test_bad_input_is_named(change, argument):
    good = {"scores": torch.zeros(4, 10), "lengths": torch.full((4,), 6), "k": 5}
    with pytest.raises(ValueError, match=rf"select\.topk: {argument} must be"):
        select.topk(**{**good, **change})


def test_bad_tables_are_named():
    scores, lengths, table = torch.zeros(4, 10), torch.full((4,), 6), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"select\.topk_slots: row_to_request must be"):
        select.topk_slots(scores, lengths, 5, table, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"select\.topk_ragged: offsets must be"):
        select.topk_ragged(scores, lengths, 5, torch.zeros(4))
    with pytest.raises(ValueError, match=r"select\.positions_to_slots: page_size must be"):
        select.positions_to_slots(torch.zeros(4, 2, dtype=torch.int32), table, torch.zeros(4, dtype=torch.int32), 0)
    with pytest.raises(ValueError, match=r"select\.topk_slots: row_to_request must be in 0 \.\. 1"):
        select.topk_slots(scores, lengths, 5, table, torch.tensor([0, 1, 2, 0]))
    requests = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"select\.topk_slots: lengths must be within the 3 x 1 positions"):
        select.topk_slots(scores, lengths, 5, table, requests, 1)
    assert select.topk_slots(scores, lengths, 5, table, requests, 2).shape == (4, 5)
    with pytest.raises(ValueError, match=r"select\.positions_to_slots: positions must be within"):
        select.positions_to_slots(torch.full((4, 2), 192), table, requests)
