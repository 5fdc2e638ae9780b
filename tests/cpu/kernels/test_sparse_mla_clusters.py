"""How many blocks share a row in the CUDA C++ kernel of sparse MLA."""

import pytest

from sglang_dsa_plugin.kernels.cuda import sparse_mla

# What an H200 (132 multiprocessors) says it holds of clusters of this kernel's blocks.
H200 = {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}


@pytest.mark.parametrize(
    ("rows", "cluster"),
    [
        (1, 8),
        (15, 8),
        (16, 6),
        (17, 6),
        (18, 5),
        (22, 5),
        (23, 4),
        (30, 4),
        (31, 3),
        (39, 3),
        (40, 2),
        (66, 2),
        (67, 1),
    ],
)
def test_all_rows_run_at_a_time(rows, cluster):
    assert sparse_mla.cluster_of(rows, 132, H200.__getitem__) == cluster


def test_a_row_of_many_is_one_blocks():
    asked = []
    assert sparse_mla.cluster_of(4096, 132, lambda size: asked.append(size) or 0) == 1
    assert not asked


@pytest.mark.parametrize(
    ("rows", "tiles", "picks", "parts"),
    [
        (4096, 1, 2048, [(4092, 1), (4, 8)]),
        (4096, 2, 2048, [(4092, 1), (4, 8)]),
        (8192, 1, 2051, [(8184, 1), (8, 8)]),
        (150, 1, 2048, [(132, 1), (18, 5)]),
        (4096, 3, 2048, [(4092, 1), (4, 8)]),
        (2048, 1, 2048, [(2048, 1)]),  # 68 would be left, for 66 clusters of two
        (4092, 1, 2048, [(4092, 1)]),
        (132, 1, 2048, [(132, 1)]),
        (64, 1, 2048, [(64, 2)]),
        (4096, 1, 512, [(4096, 1)]),
        (5, 200, 2048, [(5, 1)]),
    ],
)
def test_the_rows_that_are_left_are_shared(rows, tiles, picks, parts):
    assert sparse_mla.launches(rows, tiles, picks, 132, H200.__getitem__) == parts


def test_all_rows_are_launched_once():
    for rows in range(1, 700):
        for tiles in (1, 2, 3, 8):
            parts = sparse_mla.launches(rows, tiles, 2048, 132, H200.__getitem__)
            assert sum(count for count, _ in parts) == rows and all(count > 0 for count, _ in parts)
            for count, cluster in parts:
                assert cluster == 1 or (count * tiles <= H200[cluster] and count * tiles * cluster <= 132)
