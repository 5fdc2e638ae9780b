"""The selection in CUDA C++ on a CUDA device: picks bit for bit, in every form of the kernel that the table launches.

tests/cpu/kernels/test_cuda_select.py runs the same source on a CPU.
"""

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import select as cuda_select
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

# (rows, columns) whose launches differ on an H200 in threads, blocks of a row and scores that a block holds.
LAUNCHES = [
    (1, 8192),
    (1, 32768),
    (1, 131072),
    (1, 1 << 20),
    (4, 65536),
    (16, 32768),
    (16, 131072),
    (24, 300000),
    (40, 65536),
    (64, 8192),
    (64, 32768),
    (64, 131072),
    (100, 24576),
    (200, 8192),
    (200, 40000),
]


@pytest.fixture(scope="module", autouse=True)
def here():
    selection_checks.skip_unless_here("topk", "cuda", k=K)


@pytest.mark.parametrize(("rows", "columns"), LAUNCHES)
def test_all_kinds_of_scores_at_the_most_that_a_launch_holds(monkeypatch, rows, columns):
    launched(monkeypatch)
    gpu = index_tables.gpu_of(torch.device("cuda"))
    shape = tables.select_shape(gpu, rows, columns)
    most = 4 * shape.threads * shape.cluster * shape.batch * (1 if shape.held else 3)
    for width in (most, most - 1):
        lengths = torch.tensor([width, max(K + 1, width // 3), width - 2], device="cuda", dtype=torch.int32)
        for kind in selection_inputs.KINDS:
            assert_picks(selection_inputs.scores(kind, 3, width, generator(1)), lengths, shape=shape)


@pytest.mark.parametrize("k", [1, 64, 256, 2048, 4096])
def test_widths_around_every_stretch(monkeypatch, k):
    launched(monkeypatch)
    for whole in (2048, 4096, 8192, 16384, 32768, 65536):
        for width in (whole - 1, whole, whole + 1):
            for kind in ("thousands of values", "mostly zeros"):
                assert_picks(selection_inputs.scores(kind, 6, width, generator(width)), lengths_of(width, 6, k), k)


def test_numbers_of_rows(monkeypatch):
    launched(monkeypatch)
    for rows in (1, 2, 3, 4, 5, 15, 16, 17, 24, 25, 49, 50, 66, 67, 132, 133, 255):
        for kind in ("sum of relus", "mostly zeros"):
            assert_picks(selection_inputs.scores(kind, rows, 20000, generator(rows)), lengths_of(20000, rows))


@pytest.mark.parametrize(("init", "local"), [(0, 0), (4, 0), (0, 64), (100, 1000), (2000, 100), (3000, 9)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_windows_forced_tokens_and_offsets(monkeypatch, init, local, dtype):
    launched(monkeypatch)
    assert_windows(init, local, dtype)


@pytest.mark.parametrize("rows", [2, 16, 64, 200])
@pytest.mark.parametrize("kind", ["five values", "mostly zeros", "last bits", "normal"])
def test_the_same_25_times(monkeypatch, rows, kind):
    launched(monkeypatch)
    assert_picks(selection_inputs.scores(kind, rows, 20000, generator(2)), lengths_of(20000, rows), repeats=25)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_captured_graph_follows_new_lengths_and_scores(monkeypatch, rows):
    launched(monkeypatch)
    assert_graph_follows(rows)


@pytest.mark.parametrize("kind", selection_checks.TIES)
def test_the_operators_with_ties(kind):
    scores = selection_inputs.scores("five values", 7, 8320, generator(4))
    want = selection_checks.by_sorting(scores, lengths_of(8320, 7), K)
    assert torch.equal(select.topk(scores, lengths_of(8320, 7), K, impl="cuda"), want)
    selection_checks.with_ties("cuda", K, kind)


def test_the_operators_without_ties_in_windows():
    selection_checks.without_ties("cuda", K, 70000)


def test_slots_and_offsets():
    selection_checks.slots_and_offsets("cuda")


def test_what_the_kernel_cannot_take_goes_to_triton(monkeypatch):
    lengths = torch.tensor([8190, 8189, 2049], device="cuda")
    exact = torch.randn(3 * 8190, device="cuda", generator=generator()).view(3, 8190)
    assert exact.untyped_storage().nbytes() % 16  # the last group of four is not whole
    spread = selection_inputs.scores("normal", 3, 8190, generator())
    spread.copy_(exact)
    want = selection_checks.by_sorting(exact, lengths, K)
    taken, triton = [], cuda_select.triton_select.select_rows
    monkeypatch.setattr(
        cuda_select.triton_select, "select_rows", lambda *given, **more: taken.append(1) or triton(*given, **more)
    )
    assert torch.equal(cuda_select.select_rows(exact, lengths, K, None, 0, 0), want) and len(taken) == 1
    assert torch.equal(cuda_select.select_rows(spread, lengths, K, None, 0, 0), want) and len(taken) == 1
    # 8000 / 4 pages of one position are in a block's stretch, which is fine; 40000 / 8 are too many, and 3000000 for
    # select_many.cu, too, which keeps none.
    table = torch.arange(3000000, device="cuda").flip(0).view(1, -1)
    owner = torch.zeros(3, dtype=torch.int64, device="cuda")
    for width, launches in ((8000, 1), (40000, 1), (3000000, 2)):
        scores, lengths = selection_inputs.scores("normal", 3, width, generator()), lengths_of(width, 3)
        got = cuda_select.select_rows(scores, lengths, K, None, 0, 0, slots=(table, owner, 1))
        picks = selection_checks.by_sorting(scores, lengths, K)
        assert torch.equal(got, torch.where(picks >= 0, 2999999 - picks, -1)) and len(taken) == launches
