"""What kernels compiled by numba need around them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_dsa_plugin import plan
from sglang_dsa_plugin.indexer.token import TokenIndexer
from sglang_dsa_plugin.kernels.numba import memory

FIRST_USE = """
import numba.core.caching as caching
def nowhere(*_):
    raise RuntimeError("cannot cache function: no locator available")
caching.CacheImpl.__init__ = nowhere
from sglang_dsa_plugin.kernels.numba import memory
bits, out = memory.np.array([0x3F80], memory.np.uint16), memory.np.zeros(1, memory.np.float32)
memory.widen_bf16(bits, out.view(memory.np.int32))
assert out[0] == 1.0
"""


def test_without_a_place_for_the_cache_they_are_compiled_in_every_process():
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


CALLER = """
import numpy as np
from layouts import FACTOR
from memory import jit, some

@jit
def kernel(x):
    x[0] = some() * FACTOR

if __name__ == "__main__":
    x = np.zeros(1, np.int64)
    kernel(x)
    print(x[0], sum(kernel.stats.cache_hits.values()))
"""


def test_an_edit_of_another_file_is_not_met_by_what_was_compiled_before(tmp_path):
    """Of a function in memory.py that a kernel calls, and of a constant from outside the folder."""
    sources = tmp_path / "kernels"
    sources.mkdir()
    original = Path(memory.__file__).read_text()

    def answer(some: int, factor: int) -> str:
        (sources / "memory.py").write_text(f"{original}\n\n@jit\ndef some():\n    return {some}\n")
        (tmp_path / "layouts.py").write_text(f"FACTOR = {factor}\n")
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-B", str(sources / "caller.py")], capture_output=True, text=True, timeout=120,
            env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip()

    (sources / "caller.py").write_text(CALLER)
    assert answer(3, 10) == "30 0"
    assert answer(3, 10) == "30 1"
    assert answer(4, 10) == "40 0"
    assert answer(4, 20) == "80 0"


@pytest.mark.parametrize("name", ["numba", "torch"])
def test_a_forced_implementation_reaches_only_the_operators_that_have_it(monkeypatch, name):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_IMPL", name)
    forced = [plan.forced_impl(op) for op in ("index_keys_store", "index_queries", "index_front")]
    cos_sin = torch.cat([torch.ones(9, 32), torch.zeros(9, 32)], dim=1)
    indexer = TokenIndexer(4, "half", cos_sin, torch.float8_e4m3fn, *forced)
    made = indexer.queries(torch.randn(3, 512), torch.randn(3, 4), torch.arange(3))
    assert made.q.shape == (3, 4, 128) and made.gate.shape == (3, 4)
