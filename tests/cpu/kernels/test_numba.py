"""What kernels compiled by numba need around them."""

import subprocess
import sys

import pytest
import torch

from sglang_dsa_plugin import plan
from sglang_dsa_plugin.indexer.token import TokenIndexer

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


@pytest.mark.parametrize("name", ["numba", "torch"])
def test_a_forced_implementation_reaches_only_the_operators_that_have_it(monkeypatch, name):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_IMPL", name)
    forced = [plan.forced_impl(op) for op in ("index_keys_store", "index_queries", "index_front")]
    cos_sin = torch.cat([torch.ones(9, 32), torch.zeros(9, 32)], dim=1)
    indexer = TokenIndexer(4, "half", cos_sin, torch.float8_e4m3fn, *forced)
    made = indexer.queries(torch.randn(3, 512), torch.randn(3, 4), torch.arange(3))
    assert made.q.shape == (3, 4, 128) and made.gate.shape == (3, 4)
