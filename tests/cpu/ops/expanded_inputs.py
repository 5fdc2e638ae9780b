"""What tests of attention on expanded keys and values (ops.dense_mha, ops.masked_mha) share: inputs and judgement."""

from __future__ import annotations

import torch

from tests.cpu.ops.bounds import assert_attention

SCALE = 192**-0.5
# Queries and keys of each request.
BATCHES = {
    "one": ([1], [1]),
    "long": ([301], [301]),
    "long with a prefix": ([131], [421]),
    "one query on a prefix": ([1], [333]),
    "no request": ([], []),
    "all empty": ([0, 0], [0, 0]),
    "empty among others": ([0, 7, 0, 3, 0], [0, 7, 12, 3, 0]),
    "many short": ([3, 1, 9, 17, 2, 5, 1, 8], [3, 4, 9, 20, 70, 5, 1, 30]),
    "short and long": ([4, 270, 4, 1, 70], [4, 333, 9, 1, 70]),
    "fewer keys than queries": ([5, 6, 90, 4], [2, 0, 40, 4]),
}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def starts(lengths, index=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(index)


def values(queries, keys, heads, width, width_v, dtype, size=1.0):
    """q, k and v; `size` is that of the queries."""
    q = (size * normal(sum(queries), heads, width)).to(dtype)
    k = normal(sum(keys), heads, width, seed=1).to(dtype)
    v = normal(sum(keys), heads, width_v, seed=2).to(dtype)
    return q, k, v


def check(operator, reference, arguments, scale=SCALE):
    """The operator's answer, after it was compared with the reference. arguments: q, k, v and what follows them."""
    got = operator(*arguments, scale)
    q, _, v = arguments[:3]
    assert got[0].dtype == q.dtype and got[0].shape == (*q.shape[:2], v.shape[2]) and got[1].shape == q.shape[:2]
    assert_attention(got, reference(*arguments, scale), f32=q.dtype == torch.float32)
    return got
