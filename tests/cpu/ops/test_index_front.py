"""ops.index_front: the two operators in one, and what it refuses."""

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.ops import index_front, index_keys, index_queries

from . import index_front_inputs as data


def inputs_of(rows=5, heads=4, dtype=FP8):
    """Arguments of store_and_prepare by name, without lengths and topk."""
    key, weight, bias, eps, positions, cos_sin, layout = data.key_inputs(rows, "half").args()
    query, weights, *_ = data.query_inputs(rows, heads, "half")
    return dict(
        pages=data.new_pages(3, dtype),
        slots=data.slots_of(rows, 3),
        key=key,
        weight=weight,
        bias=bias,
        eps=eps,
        query=query,
        weights=weights,
        positions=positions,
        cos_sin=cos_sin,
        layout=layout,
    )


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("short", [False, True])
def test_equals_the_two_calls(dtype, short):
    given = inputs_of(37, dtype=dtype)
    more = {"lengths": torch.arange(37), "topk": 20} if short else {}
    q, gate = index_front.store_and_prepare(**given, **more, impl="torch")
    pages, rope = data.new_pages(3, dtype), [given[name] for name in ("positions", "cos_sin", "layout")]
    of_keys = [given[name] for name in ("slots", "key", "weight", "bias", "eps")]
    index_keys.store(pages, *of_keys, *rope, impl="torch")
    want = index_queries.prepare(given["query"], given["weights"], *rope, dtype, impl="torch")
    assert torch.equal(given["pages"].view(torch.uint8), pages.view(torch.uint8)) and q.dtype == dtype
    long = torch.arange(37) > (20 if short else -1)
    assert torch.equal(q[long].view(torch.uint8), want[0][long].view(torch.uint8))
    assert torch.equal(gate[long], want[1][long])


def test_reference_is_that_of_both():
    given = inputs_of()
    q, gate = index_front.reference(**given)
    rows = data.key_inputs(5, "half")
    data.assert_keys(given["pages"], given["slots"], rows)
    assert q.dtype == FP8 and torch.equal(gate, index_queries.reference(*data.query_inputs(5, 4, "half"), FP8)[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(4, 128)}, r"projected must be .*\[5, 128\]"),
        ({"query": torch.zeros(5, 3 * 128)}, r"projected must be .*\[5, 512\]"),
        ({"query": torch.zeros(4, 512), "weights": torch.zeros(4, 4)}, r"positions must be .*\[4\]"),
        ({"eps": -1.0}, "eps must be"),
        ({"layout": "both"}, "layout must be one of"),
        ({"lengths": torch.zeros(4, dtype=torch.int32)}, r"lengths must be .*\[5\]"),
        ({"topk": -1}, "topk must be an int of at least 0"),
        ({"impl": "nothing"}, "index_front: impl='nothing' does not exist"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        index_front.store_and_prepare(**inputs_of() | change)
