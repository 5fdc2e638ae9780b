"""Sparse MLA in Triton without a GPU: the portable kernel under the interpreter, and the table of plans."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dsa_plugin import support
from sglang_dsa_plugin.kernels.triton import sparse_mla_tiles as tiles

LAYOUTS = ("bf16_1152", "fp8_656", "fp8_576")
ROOT = Path(__file__).parents[3]


def test_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/cpu/kernels/interpreted_sparse_mla.py"]
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="2")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.parametrize("sm", [None, 80, 86, 89, 90, 100, 120])
def test_splits_cover_the_picks(sm):
    rows, heads, picks = (1, 7, 64, 131, 265, 70000), (1, 8, 16, 17, 32, 128), (1, 64, 2048, 2051, 9000)
    for layout, r, h, k, q_parts in itertools.product(LAYOUTS, rows, heads, picks, (1, 2, 3)):
        hopper = sm == 90 and q_parts == 1
        plan = tiles.choose(sm, 132, layout, r, h, k, hopper, q_parts)
        assert plan.splits * plan.split_picks >= k > (plan.splits - 1) * plan.split_picks
        assert plan.split_picks % plan.block_n == 0
        assert plan.kernel == "gather" or hopper
        # Partial results stay small: splits only where the rows alone leave processors idle.
        assert plan.splits == 1 or r * -(-h // plan.block_h) * plan.splits <= 2 * 132


def test_few_bf16_rows_have_a_tile_for_each_program():
    def plan(layout, rows, heads):
        return tiles.choose(90, 132, layout, rows, heads, 2048, True, 1)

    for rows, heads in ((1, 8), (2, 16), (1, 32)):
        assert plan("bf16_1152", rows, heads) == tiles.Plan("gather", 16, 32, 4, 2, 32, 64)
        assert plan("fp8_656", rows, heads).kernel == "hopper"
    assert plan("bf16_1152", 3, 16).kernel == plan("bf16_1152", 2, 32).kernel == "hopper"


def test_it_is_the_first_choice_on_a_gpu_and_runs_nowhere_else():
    for layout in LAYOUTS:
        asked = {"device": "cuda", "layout": layout, "heads": 16, "k": 2048}
        assert support.choose("sparse_mla", sm=80, impl="triton", **asked).name == "triton"
        assert support.choose("sparse_mla", sm=80, **asked).name == "triton"
        with pytest.raises(ValueError, match="runs on cuda, not on cpu"):
            support.choose("sparse_mla", impl="triton", **asked | {"device": "cpu"})
    with pytest.raises(ValueError, match=r"reads .*, not fp32_2304"):
        support.choose("sparse_mla", device="cuda", sm=90, layout="fp32_2304", heads=16, k=64, impl="triton")
