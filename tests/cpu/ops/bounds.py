"""The numeric bounds of docs/operators.md for attention, and a probe for memory."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def assert_attention(got, want, f32=False, spread=None, rounded=1):
    """got = (out [..., D], lse [...]) against the fp64 pair `want`; f32: nothing was stored in 16 bits.

    spread [..., D]: sum over the keys of weight * |value|, for a kernel of another package that rounds its weights to
    bf16, each by up to 2^-8 of itself: then the error is at most 2^-8 of that and 2^-8 of the output, once for every
    time that it is `rounded` to bf16: twice where a sink is brought in after the kernel.
    """
    out, lse = got[0].double(), got[1].double()
    assert got[1].dtype == torch.float32
    none = want[1] == -torch.inf
    assert torch.equal(lse == -torch.inf, none)
    assert (out[none] == 0).all()
    # Rows without a pick are right already, and so are they here.
    lse, want_lse = lse.masked_fill(none, 0), want[1].masked_fill(none, 0)
    want_out = want[0].masked_fill(none.unsqueeze(-1), 0)
    _within((lse - want_lse).abs(), 1e-5 + 2e-6 * want_lse.abs(), "lse", lse, want_lse)
    error = (out - want_out).abs()
    largest = want_out.abs().amax(dim=-1, keepdim=True).clamp(min=1) if want_out.numel() else want_out
    if f32:
        # A weight is off by what its score is off, and f32 knows a score to some 1e-7 of its size.
        _within(error, 2e-6 * largest * want_lse.abs().clamp(min=1).unsqueeze(-1), "out", out, want_out)
    if spread is not None:
        bound = 2**-8 * (spread.double() + rounded * want_out.abs()) + 1e-5
        _within(error, bound, "out", out, want_out)
        return
    _within(error, torch.maximum(1e-3 * largest, 2 / 128 * want_out.abs()), "out", out, want_out)
    cosine = torch.nn.functional.cosine_similarity(out, want_out, dim=-1, eps=1e-300)
    assert (1 - cosine <= 5e-6)[want_out.abs().sum(-1) > 0].all()


def _within(error, allowed, name, got, want):
    """Every error is allowed; the message has the place (row, head, column) where it is least so. NaN is not."""
    allowed = allowed.expand_as(error)
    if (error <= allowed).all():
        return
    worst = (error / allowed).nan_to_num(nan=torch.inf).argmax()
    place = tuple(int(i) for i in torch.unravel_index(worst, error.shape))
    wrong = int((~(error <= allowed)).sum())
    raise AssertionError(
        f"{name}{list(place)} is {float(got[place])!r}, want {float(want[place])!r}: off by {float(error[place]):.3g}, "
        f"allowed {float(allowed[place]):.3g}; {wrong} of {error.numel()} are off by more than allowed"
    )


class LargestTensor(TorchDispatchMode):
    """Within the context, `bytes` is the size of the largest tensor any torch operation returned."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result
