"""select.cu on a CPU, built by g++ with every CUDA thread a fiber (cuda_emulation.h): picks bit for bit.

What this cannot see is memory that only a GPU orders; tests/gpu/test_cuda_select.py runs it there.
"""

import random

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import select as cuda_select
from sglang_dsa_plugin.kernels.cuda import tables
from tests.cpu.kernels import cuda_emulation
from tests.cpu.kernels.cuda_emulation import assert_cut_windows, assert_picks, assert_random_windows
from tests.cpu.ops import selection_inputs

pytestmark = cuda_emulation.needs

# (threads, cluster, batch, held, listed): each way through the source with few threads, lists that are often too short,
# then what is launched on an H200.
SMALL = [(128, 2, 4, True, 512), (256, 1, 2, False, 64), (128, 8, 8, True, 1024)]
MORE = [
    (128, 4, 4, False, 16),
    (128, 16, 1, True, 128),
    (1024, 2, 8, True, 1024),
    (512, 8, 8, True, 1024),
    (512, 4, 4, False, 256),
    (512, 1, 4, False, 256),
]


@pytest.fixture(
    scope="module", params=[*SMALL, *(pytest.param(form, marks=pytest.mark.full) for form in MORE)], ids=str
)
def form(request, tmp_path_factory):
    """(the kernel with the arguments of select.cu, rows and a seed; the most columns it holds)."""
    shape = tables.SelectShape(*request.param, 1, 1)  # few scores are few enough for a block alone
    run = cuda_emulation.build(tmp_path_factory.mktemp("emulated"), cuda_select.form(shape, cuda_select.BOTH, 64))
    return run, 4 * shape.threads * shape.cluster * shape.batch * (1 if shape.held else 3)


@pytest.mark.parametrize("kind", selection_inputs.KINDS)
def test_all_kinds_of_scores(form, kind):
    run, most = form
    scores = selection_inputs.scores(kind, 3, most, torch.Generator().manual_seed(1))
    k = min(700, most // 3)
    assert_picks(run, scores, torch.tensor([most, most - 4, max(k + 1, most // 2)]), k, seed=3)


@pytest.mark.parametrize("trial", range(12))
def test_windows_forced_tokens_offsets_and_widths(form, trial):
    run, most = form
    number = random.Random(trial)
    width, k = number.randrange(2, most - 3), number.choice([1, 64, number.randrange(1, 1500)])
    assert_random_windows(run, number, width, k, trial)


def test_windows_outside_the_columns_are_cut(form):
    run, most = form
    assert_cut_windows(run, most - 7, 64)
