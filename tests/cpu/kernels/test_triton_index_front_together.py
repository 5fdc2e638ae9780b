"""Keys and queries of a step in one Triton launch, in Triton's interpreter, against the two launches, bit for bit.

The interpreter must be chosen before Triton is imported, so the tests run in a process of their own.
"""

import os

import pytest
import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import FP8
from tests.cpu.kernels import interpreted
from tests.cpu.ops import index_front_inputs as data

if os.environ.get("TRITON_INTERPRET") != "1":

    @pytest.mark.full
    def test_in_the_interpreter():
        interpreted.assert_passes(__file__)

    def test_a_gpu_takes_it_before_torch_and_a_cpu_never():
        for sm in (80, 86, 89, 90, 100, 120):
            assert support.choose("index_front", device="cuda", sm=sm).name == "triton"
        assert support.choose("index_front", device="cuda", sm=75).name == "torch"
        assert support.choose("index_front", device="cpu").name == "torch"

else:
    from sglang_dsa_plugin.kernels.triton import index_front as triton_front
    from tests.cpu.kernels import triton_interpreter  # noqa: F401

    def arguments_of(rows, heads, layout, norm, dtype):
        """(inputs of keys, of queries, slots, arguments of store_and_prepare between the pages and the last two)."""
        keys, slots = data.key_inputs(rows, layout, norm, torch.bfloat16), data.slots_of(rows, 3)
        queries = data.query_inputs(rows, heads, layout, torch.bfloat16)
        key, *norm_of_keys, positions, cos_sin, _ = keys.args()
        return keys, queries, slots, (slots, key, *norm_of_keys, *queries[:2], positions, cos_sin, layout, dtype)

    def same(a, b):
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))

    @pytest.mark.parametrize(("layout", "norm"), [("half", "layer"), ("interleaved", "rms")])
    @pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float32])
    # One launch; or, with more tiles than the interpreter's four processors take at a time, two.
    @pytest.mark.parametrize(("rows", "heads"), [(1, 5), (5, 48), (23, 16)])
    def test_equals_two_calls(layout, norm, dtype, rows, heads, monkeypatch):
        keys, queries, slots, arguments = arguments_of(rows, heads, layout, norm, dtype)
        pages, want_pages = (data.new_pages(3, dtype) for _ in range(2))
        triton_front.store_keys(want_pages, slots, *keys.args())
        want = triton_front.prepare_queries(*queries, dtype)
        if rows < 20:
            monkeypatch.setattr(triton_front, "store_keys", None)
            monkeypatch.setattr(triton_front, "prepare_queries", None)
        got = triton_front.store_and_prepare(pages, *arguments, None, 0)
        assert same(pages, want_pages) and all(map(same, got, want))
        # Rows that keep every token lose no more than their queries and gate.
        lengths, pages = torch.arange(rows) % 3 + 7, data.new_pages(3, dtype)
        got = triton_front.store_and_prepare(pages, *arguments, lengths.int(), 8)
        assert same(pages, want_pages)
        assert all(same(a[lengths > 8], b[lengths > 8]) for a, b in zip(got, want))

    @pytest.mark.parametrize("rows", [3, 30])
    def test_no_query_is_made_where_no_row_wants_one(rows, monkeypatch):
        keys, _, slots, arguments = arguments_of(rows, 16, "half", "layer", torch.float32)
        new = torch.full((rows, 16, 128), 7.0), torch.full((rows, 16), 7.0)
        monkeypatch.setattr(triton_front, "_new_queries", lambda *_: new)
        pages = data.new_pages(3, torch.float32)
        triton_front.store_and_prepare(pages, *arguments, torch.full((rows,), 8), 8)
        assert (new[0] == 7).all() and (new[1] == 7).all()
        data.assert_keys(pages, slots, keys)
