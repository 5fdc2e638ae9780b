"""select_many.cu on a CPU, built by g++ with every CUDA thread a fiber (cuda_emulation.h): picks bit for bit.

What this cannot see is memory that only a GPU orders; tests/gpu/test_cuda_select_many.py runs it there.
"""

import random

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import select as cuda_select
from sglang_dsa_plugin.kernels.cuda import tables
from sglang_dsa_plugin.kernels.triton.index_tables import Gpu
from tests.cpu.kernels import cuda_emulation
from tests.cpu.kernels.cuda_emulation import assert_cut_windows, assert_picks, assert_random_windows
from tests.cpu.ops import selection_inputs

pytestmark = cuda_emulation.needs

# (threads, batch, strata, listed): lists that are often too short or too long, and one of a usual length.
FORMS = [(128, 4, 64, 1024), (256, 8, 512, 2048)]


@pytest.fixture(scope="module", params=FORMS, ids=str)
def form(request, tmp_path_factory):
    threads, batch, strata, listed = request.param
    shape = tables.ManyShape(
        threads, 1, batch, strata, listed, 64, False, 1
    )  # few scores are short enough for registers
    form = cuda_select.form(shape, cuda_select.BOTH, 64)
    run = cuda_emulation.build(tmp_path_factory.mktemp("emulated"), form)
    return run, listed


@pytest.mark.parametrize("kind", selection_inputs.KINDS)
def test_all_kinds_of_scores(form, kind):
    run, listed = form
    width = 6 * listed + 77
    scores = selection_inputs.scores(kind, 4, width, torch.Generator().manual_seed(1))
    k = listed * 5 // 8
    assert_picks(run, scores, torch.tensor([width, width - 4, width // 2, max(k + 1, listed - 9)]), k, seed=3)


@pytest.mark.parametrize("k", [1, 5, 20, 21, 300])
@pytest.mark.parametrize("kind", ["few infinities", "up to infinity", "mostly NaN", "one outlier", "descending"])
def test_few_picks_among_the_highest_scores_there_are(form, kind, k):
    run, listed = form
    width = 6 * listed + 77
    scores = selection_inputs.scores(kind, 4, width, torch.Generator().manual_seed(k))
    assert_picks(run, scores, torch.tensor([width, width - 4, 2 * listed, k + 1]), k, seed=k)


@pytest.mark.parametrize("trial", range(12))
def test_windows_forced_tokens_offsets_and_widths(form, trial):
    run, listed = form
    number = random.Random(trial)
    width = number.randrange(2, 8 * listed)
    k = number.choice([1, 64, number.randrange(1, listed * 5 // 8)])
    assert_random_windows(run, number, width, k, trial)


@pytest.mark.full
@pytest.mark.parametrize(("width", "k"), [(32768, 2048), (40000, 4096), (65536, 2048)])
def test_what_is_launched_on_an_h200(tmp_path, width, k):
    shape = tables.many_shape(Gpu("cuda", 90, 132, 227), width + 3, k)
    run = cuda_emulation.build(tmp_path, cuda_select.form(shape, cuda_select.BOTH, 64))
    for kind in ("sum of relus", "mostly zeros", "thousands of values", "bursts", "mostly NaN", "any bits"):
        scores = selection_inputs.scores(kind, 3, width, torch.Generator().manual_seed(1))
        assert_picks(run, scores, torch.tensor([width, width - 5, k + 1]), k, seed=3)


def test_windows_outside_the_columns_are_cut(form):
    run, listed = form
    assert_cut_windows(run, 4 * listed - 7, 64)
