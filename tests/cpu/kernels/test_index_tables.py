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
        assert group <= rows and (group == rows or group <= 16 or group % 16 == 0)
        kept_by_scores = budget * MB <= 4 * lists(1, width, k)
        for n in (group, rows % group) if group else ():
            assert 4 * width * group + (0 if kept_by_scores else lists(n, width, k)) <= budget * MB
        if not group:
            assert 4 * width + (0 if kept_by_scores else lists(1, width, k)) > budget * MB


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
