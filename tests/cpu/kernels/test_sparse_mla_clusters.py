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
