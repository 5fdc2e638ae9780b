"""Groups of rows keep their scores and the selection's lists within the budget, whatever the shape."""

import pytest

pytest.importorskip("triton")

from sglang_dsa_plugin.kernels.triton import index_select, index_tables

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
