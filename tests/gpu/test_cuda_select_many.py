"""The selection of many rows in CUDA C++ (select_many.cu) on a CUDA device: picks bit for bit, at every launch of the
table.

tests/cpu/kernels/test_cuda_select_many.py runs the same source on a CPU.
"""

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import tables
from sglang_dsa_plugin.kernels.triton import index_tables
from sglang_dsa_plugin.ops import select
from tests.cpu.ops import selection_inputs
from tests.gpu import selection_checks
from tests.gpu.cuda_picks import (
    K,
    assert_graph_follows,
    assert_picks,
    assert_windows,
    generator,
    launched,
    lengths_of,
)

pytestmark = pytest.mark.gpu

MANY = 300


@pytest.fixture(scope="module", autouse=True)
def here():
    selection_checks.skip_unless_here("topk", "cuda", k=K)


def shape_of(columns, k=K):
    return tables.many_shape(index_tables.gpu_of(torch.device("cuda")), columns, k)


@pytest.mark.parametrize("columns", [2049, 8192, 9999, 32768, 131072, 1 << 20])
def test_all_kinds_of_scores(monkeypatch, columns):
    launched(monkeypatch)
    shape = shape_of(columns + 3)
    rows = 3 if columns > 200000 else 8
    for width in (columns, columns - 1):
        lengths = lengths_of(width, rows)
        for kind in selection_inputs.KINDS:
            assert_picks(selection_inputs.scores(kind, rows, width, generator(1)), lengths, shape=shape)


@pytest.mark.parametrize("k", [1, 64, 256, 2048, 4096])
def test_numbers_of_picks_and_widths_around_every_chunk(monkeypatch, k):
    launched(monkeypatch)
    for whole in (4096, 8192, 16384, 65536):
        for width in (whole - 1, whole, whole + 1):
            for kind in ("thousands of values", "mostly zeros", "sum of relus"):
                scores = selection_inputs.scores(kind, 6, width, generator(width))
                assert_picks(scores, lengths_of(width, 6, k), k, shape=shape_of(width + 3, k))


def test_numbers_of_rows(monkeypatch):
    launched(monkeypatch)
    for rows in (256, 257, 264, 265, 1000):
        for kind in ("sum of relus", "mostly zeros", "bursts"):
            assert_picks(selection_inputs.scores(kind, rows, 20000, generator(rows)), lengths_of(20000, rows))


@pytest.mark.parametrize("k", [1, 5, 20, 21, 300])
def test_few_picks_among_the_highest_scores_there_are(monkeypatch, k):
    launched(monkeypatch)
    for kind in ("few infinities", "up to infinity", "mostly NaN", "one outlier", "descending"):
        for width in (32768, 131072):
            scores = selection_inputs.scores(kind, MANY, width, generator(k))
            assert_picks(scores, lengths_of(width, MANY, k), k)


def test_a_sample_that_misjudges_rows(monkeypatch):
    """Scores alike over a stretch, of which a sample sees few: lists are too short and too long, once or twice."""
    launched(monkeypatch)
    for stretch in (64, 1024, 8192):
        for width in (32768, 131072):
            alike = torch.randn(MANY, width // stretch, device="cuda", generator=generator(stretch))
            scores = selection_inputs.scores("normal", MANY, width, generator(width))
            scores += 9 * alike.repeat_interleave(stretch, dim=1)
            assert_picks(scores, lengths_of(width, MANY))


@pytest.mark.parametrize(("init", "local"), [(0, 0), (4, 0), (0, 64), (100, 1000), (2000, 100), (3000, 9)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_windows_forced_tokens_and_offsets(monkeypatch, init, local, dtype):
    launched(monkeypatch)
    assert_windows(init, local, dtype, shape_of)


@pytest.mark.parametrize("kind", ["five values", "mostly zeros", "last bits", "normal"])
def test_the_same_25_times(monkeypatch, kind):
    launched(monkeypatch)
    assert_picks(selection_inputs.scores(kind, MANY, 20000, generator(2)), lengths_of(20000, MANY), repeats=25)


def test_a_captured_graph_follows_new_lengths_and_scores(monkeypatch):
    launched(monkeypatch)
    assert_graph_follows(MANY)


def test_the_operators(monkeypatch):
    """Positions, slots of pages of one position, and offsets, each written alone."""
    launched(monkeypatch)
    width = 8320
    scores, lengths = selection_inputs.scores("five values", MANY, width, generator(4)), lengths_of(width, MANY)
    want = selection_checks.by_sorting(scores, lengths, K)
    assert torch.equal(select.topk(scores, lengths, K, impl="cuda"), want)
    table, owner = torch.randperm(2 * width, device="cuda").int().view(2, width), torch.arange(MANY, device="cuda") % 2
    slots = select.topk_slots(scores, lengths, K, table, owner, 1, impl="cuda")
    assert torch.equal(slots, select.positions_to_slots(want, table, owner, 1, impl="torch"))
    offsets = torch.arange(MANY, device="cuda") * 1000
    moved = select.topk_ragged(scores, lengths, K, offsets, impl="cuda")
    assert torch.equal(moved, torch.where(want >= 0, want + offsets.unsqueeze(1), -1).int())
