"""Launches of the CUDA C++ selection: every row's blocks run at once, a row's columns are covered, limits are kept."""

import itertools

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
        assert shape.shared_bytes <= gpu.shared_kib * 1024
        assert shape.blocks * (shape.shared_bytes + 1024) <= (gpu.shared_kib + 1) * 1024
        assert shape.cluster == 1 or rows * shape.cluster <= gpu.processors * shape.blocks
        whole = 4 * shape.threads * shape.cluster
        assert shape.held == (shape.batch * whole >= columns) and shape.batch in (1, 2, 4, 8)
        assert 64 <= shape.listed <= 128 * shape.batch
        assert shape.cluster == 1 or whole // 2 < columns


def test_launches_that_were_measured():
    def of(rows, columns):
        shape = tables.select_shape(H200, rows, columns)
        return shape.threads, shape.cluster, shape.batch, shape.held

    assert [of(1, s) for s in (8192, 32768, 131072)] == [(512, 4, 1, True), (512, 8, 2, True), (512, 8, 8, True)]
    assert [of(16, s) for s in (8192, 32768, 131072)] == [(512, 4, 1, True), (512, 4, 4, True), (1024, 4, 8, True)]
    assert of(4, 131072) == (512, 8, 8, True) and of(16, 131075) == (512, 8, 4, False)
    assert [of(64, s) for s in (8192, 32768)] == [(512, 2, 2, True), (1024, 2, 4, True)]
    assert of(24, 163840) == (512, 8, 4, False) and of(40, 65536) == (1024, 2, 8, True)
    assert of(100, 24576) == (512, 2, 8, True)


def test_scores_no_wider_than_a_short_row_have_a_block_for_each():
    for rows, columns in itertools.product((1, 16, 64, 132), (2049, 8192, 16384)):
        shape = tables.launch_shape(H200, rows, columns, 2048, 64)
        assert isinstance(shape, tables.SelectShape) and shape.cluster == 1
        assert shape.held and columns <= 4 * shape.threads * shape.vectors <= 4 * shape.threads * shape.batch
        assert shape.shared_bytes <= 227 * 1024
    for rows, columns, page_size in ((16, 16385, 64), (133, 8192, 64), (16, 8192, 1)):
        assert tables.launch_shape(H200, rows, columns, 2048, page_size) != tables.short_shape(H200, columns)


def test_where_blocks_of_one_row_each_are_taken():
    def many(rows, columns):
        return isinstance(tables.launch_shape(H200, rows, columns, 2048, 64), tables.ManyShape)

    assert not many(64, 32768) and many(64, 131072) and not many(63, 131072)
    assert not many(100, 24576) and many(100, 32768) and not many(132, 8192) and many(133, 8192)


def test_where_the_kernel_is_taken_unasked():
    def taken(gpu=H200, rows=16, width=65536, k=2048, page_size=64):
        return tables.prefers_select(gpu, rows, width, k, page_size)

    assert taken() and taken(rows=255) and taken(rows=4096) and taken(k=4096)
    assert not taken(rows=0) and not taken(k=4097) and not taken(width=2048) and not taken(width=1 << 21)
    for other in (Gpu("cuda", 80, 108, 163), Gpu("cuda", 100, 148, 227), Gpu("hip", 90, 304, 64), Gpu("cpu", 0, 4, 64)):
        assert not taken(other)


def test_a_page_table_too_long_for_a_cluster_s_block_is_left_in_memory():
    """A block's stretch of the page table has a place for 4096 entries; that of many rows keeps none."""

    def launch(width, rows=16, page_size=64):
        return type(tables.launch_shape(H200, rows, width, 2048, page_size))

    assert launch(65536) is launch(6000, page_size=1) is tables.SelectShape
    assert launch(65536, page_size=1) is launch(1 << 20, rows=255) is launch(65536, rows=256) is tables.ManyShape


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu.sm}-{gpu.processors}")
def test_blocks_of_many_rows_fit_and_cover_every_width(gpu):
    for columns, k in itertools.product((1, 8192, 32771, 131136, 1 << 20), (1, 2048, 2049, 4096)):
        for width in (columns, columns + 3):
            shape = tables.many_shape(gpu, width, k)
            assert shape.serves(width, 64) and 4 * 32 * shape.batch * shape.chunks >= width + 3
            assert shape.threads * shape.blocks <= 2048 and shape.threads * 4 <= 2048
            assert shape.shared_bytes <= gpu.shared_kib * 1024
            assert shape.blocks * (shape.shared_bytes + 1024) <= (gpu.shared_kib + 1) * 1024
            # Places for the candidates, and for the sample beforehand.
            assert shape.listed >= 3 * k // 2 and shape.strata * 2 <= shape.listed
