"""Launches of the CUDA C++ selection: every row's blocks run at once, a row's columns are covered, limits are kept."""

import pytest

from sglang_dsa_plugin.kernels.cuda import tables
from sglang_dsa_plugin.kernels.triton.index_tables import Gpu

H200 = Gpu("cuda", 90, 132, 227)
GPUS = [H200, Gpu("cuda", 90, 78, 227), Gpu("cuda", 90, 16, 227), Gpu("cuda", 100, 148, 227), Gpu("cuda", 120, 170, 99)]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu.sm}-{gpu.processors}")
@pytest.mark.parametrize("columns", [1, 2049, 8192, 32771, 131072, 1 << 20])
def test_blocks_of_all_rows_run_at_once(gpu, columns):
    for rows in range(1, 256):
        shape = tables.select_shape(gpu, rows, columns)
        assert shape.threads * shape.blocks <= 1024 and shape.cluster <= (8 if gpu.sm == 120 else 16)
        assert shape.cluster == 1 or rows * shape.cluster <= gpu.processors * shape.blocks
        whole = 4 * shape.threads * shape.cluster
        assert shape.held == 0 or shape.held * whole >= columns
        assert shape.cluster == 1 or whole // 2 < columns


def test_launches_that_were_measured():
    def of(rows, columns):
        shape = tables.select_shape(H200, rows, columns)
        return shape.threads, shape.cluster, shape.held

    assert [of(1, s) for s in (8192, 32768, 131072)] == [(512, 4, 4), (512, 8, 4), (512, 16, 4)]
    assert [of(16, s) for s in (8192, 32768, 131072)] == [(512, 4, 4), (512, 8, 4), (512, 8, 8)]
    assert [of(64, s) for s in (8192, 32768, 131072)] == [(512, 2, 4), (1024, 2, 4), (1024, 2, 0)]


def test_where_the_kernel_is_taken_unasked():
    def taken(gpu=H200, rows=16, width=65536, k=2048, page_size=64):
        return tables.prefers_select(gpu, rows, width, k, page_size)

    assert taken() and taken(rows=255) and taken(k=4096)
    assert not taken(rows=0) and not taken(rows=256) and not taken(k=4097) and not taken(width=2048)
    for other in (Gpu("cuda", 80, 108, 163), Gpu("cuda", 100, 148, 227), Gpu("hip", 90, 304, 64), Gpu("cpu", 0, 4, 64)):
        assert not taken(other)
    # A block's stretch of the page table has a place for 4096 entries.
    assert not taken(page_size=1) and taken(width=6000, page_size=1) and not taken(rows=255, width=1 << 20)
