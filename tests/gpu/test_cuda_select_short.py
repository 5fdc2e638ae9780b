"""Short rows in wide launches of the CUDA C++ selection, which one block decides alone: picks bit for bit.

tests/cpu/kernels/test_cuda_select_short.py runs the same source on a CPU.
"""

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import tables
from sglang_dsa_plugin.kernels.triton import index_tables
from tests.cpu.ops import selection_inputs
from tests.gpu import selection_checks
from tests.gpu.cuda_picks import K, assert_picks, assert_windows, generator, launched, lengths_of

pytestmark = pytest.mark.gpu

WIDE = 131072
ROWS = (1, 16, 63, 64)  # whose launches for such rows differ on an H200


@pytest.fixture(scope="module", autouse=True)
def here():
    selection_checks.skip_unless_here("topk", "cuda", k=K)


def launch(rows, columns=WIDE, k=K):
    return tables.launch_shape(index_tables.gpu_of(torch.device("cuda")), rows, columns, k, 64)


def limit_of(shape):
    """The most scores of a row that one block decides alone, where they begin on a group of four."""
    return 4 * min(shape.threads, 512) * shape.vectors


@pytest.mark.parametrize("rows", ROWS)
def test_all_kinds_of_scores_around_the_limits_beside_long_rows(monkeypatch, rows):
    launched(monkeypatch)
    shape = launch(rows)
    whole = limit_of(shape)
    around = [n + d for n in (whole, whole // 2) for d in (-1, 0, 1)]
    lengths = torch.tensor([*around, WIDE, K + 1, K, 3000, 0, WIDE // 2, whole - 127], device="cuda").int()
    for kind in selection_inputs.KINDS:
        scores = selection_inputs.scores(kind, len(lengths), WIDE, generator(1))
        assert_picks(scores, lengths, shape=shape)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", [1, 64, 512, 2048, 4096])
def test_shares_of_a_row_that_are_picked(monkeypatch, rows, k):
    launched(monkeypatch)
    shape = launch(rows, k=k)
    lengths = torch.tensor([n for n in (k + 1, 2 * k, 4 * k, 8 * k, 16384, 12288, 5000) if n <= 16384], device="cuda")
    for kind in ("sum of relus", "five values", "mostly zeros", "heavy tails", "mostly NaN"):
        scores = selection_inputs.scores(kind, len(lengths), WIDE, generator(k))
        assert_picks(scores, lengths.int(), k, shape=shape)


@pytest.mark.parametrize("width", [2049, 8191, 8192, 8193, 16384, 16385])
@pytest.mark.parametrize("rows", [1, 7, 64, 132, 133])
def test_in_scores_no_wider_than_such_rows(monkeypatch, rows, width):
    launched(monkeypatch)
    for kind in ("normal", "five values", "heavy tails"):
        assert_picks(selection_inputs.scores(kind, rows, width, generator(width)), lengths_of(width, rows))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("init", "local"), [(0, 0), (4, 64), (100, 1000), (2000, 48)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_windows_forced_tokens_and_offsets(monkeypatch, rows, init, local, dtype):
    launched(monkeypatch)
    assert_windows(init, local, dtype, lambda _: launch(rows))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["five values", "heavy tails", "last bits", "normal"])
def test_the_same_25_times(monkeypatch, rows, kind):
    launched(monkeypatch)
    lengths = torch.tensor([8192, 16384, 2049, 4096, 12000, WIDE, 8191, 10000], device="cuda").int()
    scores = selection_inputs.scores(kind, len(lengths), WIDE, generator(2))
    assert_picks(scores, lengths, shape=launch(rows), repeats=25)
