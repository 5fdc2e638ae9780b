"""Short rows in wide launches of select.cu and select_many.cu, which one block decides alone: picks bit for bit.

Both are built by g++ with every CUDA thread a fiber (cuda_emulation.h).
"""

import random

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import select as cuda_select
from sglang_dsa_plugin.kernels.cuda import tables
from sglang_dsa_plugin.ops import select
from tests.cpu.kernels import cuda_emulation
from tests.cpu.kernels.cuda_emulation import assert_picks, assert_random_windows
from tests.cpu.ops import selection_inputs

pytestmark = cuda_emulation.needs

# Few threads, so that rows are short; vectors of each thread from the fewest to the most.
FORMS = [
    tables.SelectShape(128, 4, 8, True, 1024, 1, 8),
    tables.SelectShape(256, 2, 8, True, 1024, 1, 2),
    tables.SelectShape(128, 8, 2, False, 64, 1, 4),
    tables.ManyShape(256, 1, 8, 512, 2048, 64, False, 4),
    tables.ManyShape(128, 1, 4, 64, 1024, 64, False, 8),
]
LAUNCHED = [
    tables.SelectShape(512, 8, 8, True, 1024, 1),
    tables.SelectShape(1024, 2, 8, True, 1024, 1),
    tables.ManyShape(512, 1, 8, 1024, 5056, 136, True),
]


def limit_of(shape):
    """The most scores of a row that one block decides alone, where they begin on a group of four."""
    return 4 * min(shape.threads, 512) * shape.vectors


@pytest.fixture(
    scope="module", params=[*FORMS, *(pytest.param(shape, marks=pytest.mark.full) for shape in LAUNCHED)], ids=str
)
def form(request, tmp_path_factory):
    """(the kernel with its arguments, rows and a seed; the most scores of a short row)."""
    made = cuda_select.form(request.param, cuda_select.BOTH, 64)
    return cuda_emulation.build(tmp_path_factory.mktemp("emulated"), made), limit_of(request.param)


@pytest.mark.parametrize("kind", selection_inputs.KINDS)
def test_around_the_limit_beside_long_rows(form, kind):
    run, limit = form
    width, k = 2 * limit + 77, limit // 8
    scores = selection_inputs.scores(kind, 8, width, torch.Generator().manual_seed(1))
    lengths = torch.tensor([limit, width, limit - 1, limit + 1, k + 1, limit // 2 + 1, k, width - 3])
    assert_picks(run, scores, lengths, k, seed=3)


@pytest.mark.parametrize("kind", ["normal", "five values", "mostly NaN", "mostly zeros", "one outlier"])
@pytest.mark.parametrize("share", [1.0, 0.75, 0.5, 0.2, 0.03])
def test_shares_of_a_row_that_are_picked(form, kind, share):
    """From all scores but one to few: other groups of scores give the line."""
    run, limit = form
    scores = selection_inputs.scores(kind, 3, limit, torch.Generator().manual_seed(2))
    lengths = torch.tensor([limit, limit - 127, limit // 2])
    k = min(int(share * int(lengths[2])) or 1, int(lengths[2]) - 1, 8 * 128)
    assert_picks(run, scores, lengths, k, seed=5)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_windows_that_begin_within_a_group_of_four(form, first):
    """The limit is that of groups, which a window may begin and end within."""
    run, limit = form
    width, k = limit + 40, limit // 8
    scores = selection_inputs.scores("thousands of values", 9, width, torch.Generator().manual_seed(4))
    starts = torch.full((9,), 4 * 5 + first)
    lengths = torch.tensor([limit + n for n in (-5, -4, -3, -2, -1, 0, 1, 2, 3)])
    assert_picks(run, scores, lengths, k, starts, seed=6)
    assert_picks(run, scores, lengths, k, starts, (3, 9), seed=7)


@pytest.mark.parametrize("trial", range(8))
def test_windows_forced_tokens_offsets_and_int64(form, trial):
    run, limit = form
    number = random.Random(100 + trial)
    assert_random_windows(run, number, limit + number.randrange(9), number.choice([1, 64, limit // 8]), trial)


def test_more_members_of_a_bin_than_are_ranked_and_few_that_are_equal(form):
    """Around the most members that a warp ranks: with none, some and all of the equal ones picked."""
    run, limit = form
    k = limit // 8
    for equal in (1, 2, 31, 32, 33, 34, 100):
        scores = selection_inputs.scores("normal", 3, limit, torch.Generator().manual_seed(equal))
        edge = scores.sort(dim=1, descending=True).values[:, k - 1]
        places = torch.randperm(limit, generator=torch.Generator().manual_seed(equal))[:equal]
        scores[:, places] = edge.unsqueeze(1)
        assert_picks(run, scores, torch.tensor([limit, limit, limit - 1]), k, seed=equal)


@pytest.mark.parametrize("shape", [FORMS[2], FORMS[3]], ids=str)
@pytest.mark.parametrize(
    ("write", "page"), [(cuda_select.POSITIONS, 1), (cuda_select.SLOTS, 64), (cuda_select.SLOTS, 1)]
)
def test_positions_or_slots_alone(tmp_path, shape, write, page):
    run = cuda_emulation.build(tmp_path, cuda_select.form(shape, write, page))
    limit, k = limit_of(shape), 300
    width = limit + 9
    scores = selection_inputs.scores("thousands of values", 4, width, torch.Generator().manual_seed(1))
    lengths = torch.tensor([limit, k + 1, limit + 1, limit // 2], dtype=torch.int32)
    table, owner = torch.randperm(width + 1).int().view(1, -1), torch.zeros(4, dtype=torch.int32)
    out = torch.full((4, k), 7, dtype=torch.int32)
    assert run(
        scores.data_ptr(), scores.stride(0), lengths.data_ptr(), None, out.data_ptr(), None, table.data_ptr(),
        table.stride(0), owner.data_ptr(), None, width, k, 0, 0, 0, 4, 1,
    )  # fmt: skip
    want = select.topk(scores, lengths, k, impl="torch")
    if write == cuda_select.SLOTS:
        want = select.positions_to_slots(want, table, owner, page, impl="torch")
    assert torch.equal(out, want)


def test_more_picks_than_are_put_in_order_at_once(tmp_path):
    """Such a row is shared by the cluster."""
    shape = tables.SelectShape(128, 4, 1, True, 128, 1, 8)
    run = cuda_emulation.build(tmp_path, cuda_select.form(shape, cuda_select.BOTH, 64))
    for k in (1023, 1024, 1025):
        scores = selection_inputs.scores("normal", 3, 2048, torch.Generator().manual_seed(k))
        assert_picks(run, scores, torch.tensor([2048, 1026, 1500]), k, seed=k)
