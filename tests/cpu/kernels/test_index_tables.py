"""Groups of rows keep their scores and the selection's lists within the budget, whatever the shape."""

import pytest
import torch

pytest.importorskip("triton")

from sglang_dsa_plugin.kernels.triton import index_select, index_tables
from sglang_dsa_plugin.ops import select

H200 = index_tables.Gpu("cuda", 90, 132, 227)
MB = 1 << 20


def lists(rows, width, k):
    return index_tables.select_tiles(H200, rows, width, k).list_bytes if rows else 0


@pytest.mark.parametrize("k", [512, 2048, 4096])
@pytest.mark.parametrize("width", [4160, 16384, 50560, 131072, 1 << 20])
@pytest.mark.parametrize("budget", [1, 4, 8, 16, 32, 48, 64, 128, 512])
def test_scores_and_lists_fit(budget, width, k):
    for rows in (1, 2, 60, 132, 133, 1000, 1057, 4000, 4096, 30000):
        group = index_tables.rows_in_budget(H200, rows, width, k, 4 * width, budget * MB, index_select._whole)
        assert group <= rows and (group == rows or group < 4 or group % (16 if group > 16 else 4) == 0)
        kept_by_scores = budget * MB <= 4 * lists(1, width, k)
        for n in (group, rows % group) if group else ():
            assert 4 * width * group + (0 if kept_by_scores else lists(n, width, k)) <= budget * MB
        if not group:
            assert 4 * width + (0 if kept_by_scores else lists(1, width, k)) > budget * MB


def test_rows_of_a_group():
    few, many = {0: 0, 1: 1, 3: 3, 4: 4, 7: 4, 8: 8, 9: 9, 99: 9}, {15: 12, 16: 16, 39: 32, 40: 40}
    for rows, groups in ((9, few), (40, many)):
        for fit, group in groups.items():
            asked = (H200, rows, 8192, 2048, 4 * 8192, fit * 4 * 8192 + 5, index_select._whole)
            assert index_tables.rows_in_budget(*asked, without_lists=True) == group, (rows, fit)


@pytest.mark.parametrize("rows", range(1, 41))
def test_groups_that_a_budget_makes_begin_where_lengths_are_aligned(rows, monkeypatch):
    """Or Triton would compile one more variant of a kernel for groups that begin elsewhere. Around every limit: each
    row is in one group, with its own lengths, and the scores alive fit the budget.
    """
    width, k = 96, 64
    lengths, groups = torch.arange(rows, dtype=torch.int32), []
    assert lengths.data_ptr() % 16 == 0

    def score(buffer, part, column, sizes, skip, tickets):
        groups.append((sizes.data_ptr() % 16, len(buffer), buffer.untyped_storage().nbytes()))
        buffer[:, 0] = torch.arange(rows)[part]

    def select_rows(part, sizes, k, *forced, out, **others):
        assert torch.equal(part[:, 0], sizes.float())
        out.copy_(sizes.unsqueeze(1).expand(-1, k))

    monkeypatch.setattr(index_select.cuda_select, "preferred", lambda *_asked: True)
    monkeypatch.setattr(index_select.cuda_select, "select_rows", select_rows)
    for fit in range(1, rows + 1):
        for budget in (fit * 4 * width, (fit + 1) * 4 * width - 1):
            groups.clear()
            picks = index_select._select(score, lengths, width, k, 0, 0, budget, None, None)
            assert torch.equal(picks[:, -1], lengths)
            places, counts, alive = zip(*groups)
            assert max(alive) <= budget and sum(counts) == rows
            assert fit < 4 or not any(places), (fit, counts)
            # No more groups than alignment asks for.
            assert fit - counts[0] < (1 if fit == rows or fit < 4 else 4 if fit < 16 else 16)


def test_the_groups_of_a_long_prefill():
    """tests/gpu/test_memory_budget.py: 4000 rows of 50,560 columns. Lists of all rows would be as large as 32 MB."""
    groups = {32: 128, 128: 544, 512: 2512}
    for budget, group in groups.items():
        found = index_tables.rows_in_budget(H200, 4000, 50560, 2048, 4 * 50560, budget * MB, index_select._whole)
        assert found == group, budget
        assert 4 * 50560 * group + max(lists(group, 50560, 2048), lists(4000 % group, 50560, 2048)) > 0.9 * budget * MB


def test_a_selection_without_lists_leaves_the_whole_budget_to_scores():
    given = (H200, 4000, 50560, 2048, 4 * 50560, 32 * MB, index_select._whole)
    with_lists, without = (index_tables.rows_in_budget(*given, without_lists=b) for b in (False, True))
    assert with_lists < without == 32 * MB // (4 * 50560) // 16 * 16


def test_the_selection_in_cuda_is_given_no_tickets_and_groups_of_the_whole_budget(monkeypatch):
    scores = torch.randn(40, 8192, generator=torch.Generator().manual_seed(1))
    lengths, groups = torch.arange(40) * 200, []

    def score(buffer, rows, column, sizes, skip, tickets):
        assert tickets is None and column == 0
        buffer.copy_(scores[rows])

    def select_rows(part, sizes, k, *forced, out, tickets, slots, offsets, slots_out):
        assert tickets is slots is offsets is slots_out is None
        groups.append(len(part))
        out.copy_(select.topk(part, sizes, k, *forced, impl="torch"))

    monkeypatch.setattr(index_select.cuda_select, "preferred", lambda *_asked: True)
    monkeypatch.setattr(index_select.cuda_select, "select_rows", select_rows)
    picks = index_select._select(score, lengths, 8192, 64, 2, 3, 4 * 8192 * 20, None, None)
    assert groups == [16, 16, 8]
    assert torch.equal(picks, select.topk(scores, lengths, 64, None, 2, 3, impl="torch"))
