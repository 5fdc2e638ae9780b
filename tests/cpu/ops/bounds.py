"""The numeric bounds of docs/operators.md for attention, and a probe for memory."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def assert_attention(got, want, f32=False, spread=None):
    """got = (out [..., D], lse [...]) against the fp64 pair `want`; f32: nothing was stored in 16 bits.

    spread [..., D]: sum over the keys of weight * |value|, for a kernel of another package that rounds its weights to
    bf16, each by up to 2^-8 of itself: then the error is at most 2^-8 of that and 2^-8 of the output it rounds as well.
    """
    out, lse = got[0].double(), got[1].double()
    assert got[1].dtype == torch.float32
    none = want[1] == -torch.inf
    assert torch.equal(lse == -torch.inf, none)
    assert (out[none] == 0).all()
    out, lse, want_out, want_lse = out[~none], lse[~none], want[0][~none], want[1][~none]
    assert ((lse - want_lse).abs() <= 1e-5 + 2e-6 * want_lse.abs()).all()
    error = (out - want_out).abs()
    largest = want_out.abs().amax(dim=-1, keepdim=True).clamp(min=1) if len(want_out) else want_out
    if f32:
        # A weight is off by what its score is off, and f32 knows a score to some 1e-7 of its size.
        assert (error <= 2e-6 * largest * want_lse.abs().clamp(min=1).unsqueeze(-1)).all()
    if spread is not None:
        assert (error <= 2**-8 * (spread[~none].double() + want_out.abs()) + 1e-5).all()
        return
    assert ((error <= 1e-3 * largest) | (error <= 2 / 128 * want_out.abs())).all()
    cosine = torch.nn.functional.cosine_similarity(out, want_out, dim=-1, eps=1e-300)
    assert (1 - cosine <= 5e-6)[want_out.abs().sum(-1) > 0].all()


class LargestTensor(TorchDispatchMode):
    """Within the context, `bytes` is the size of the largest tensor any torch operation returned."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result
