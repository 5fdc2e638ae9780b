"""The bound of kernels that round weights and output to bf16 holds for one that does just that, and is no wider."""

import pytest
import torch

from tests.cpu.ops.bounds import assert_attention

ROWS, PICKS, WIDTH = 8000, 10, 512


@pytest.fixture(scope="module")
def rounded():
    """(out of such a kernel, lse, fp64 out, spread, sink), rows of few picks as small differences show there."""
    g = torch.Generator().manual_seed(0)
    scores, values = torch.randn(ROWS, PICKS, generator=g).double() * 1.7, torch.randn(PICKS, WIDTH, generator=g)
    # Values that bf16 holds, as are those of packed rows: e4m3 times a power of two.
    values = values.to(torch.float8_e4m3fn).double() / 4
    weights = torch.softmax(scores, dim=1)
    against_largest = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    out = (against_largest.bfloat16().double() @ values) / against_largest.sum(dim=1, keepdim=True)
    sink = torch.randn(ROWS, generator=g).double()
    return out.bfloat16(), torch.logsumexp(scores, dim=1), weights @ values, weights @ values.abs(), sink


def test_weights_and_output_rounded_once(rounded):
    out, lse, want, spread, _ = rounded
    assert_attention((out, lse.float()), (want, lse), spread=spread)
    with pytest.raises(AssertionError, match=r"out\[\d+, \d+\] is .* off by .*, allowed .*; \d+ of 4096000 are"):
        assert_attention((out, lse.float()), (want, lse), spread=0.4 * spread, rounded=0.4)


def test_a_sink_brought_in_afterwards_rounds_once_more(rounded):
    out, lse, want, spread, sink = rounded
    share = torch.sigmoid(lse - sink).unsqueeze(1)
    out, want = (out.float() * share.float()).bfloat16(), want * share
    assert_attention((out, lse.float()), (want, lse), spread=spread, rounded=2)
    with pytest.raises(AssertionError, match="allowed"):
        assert_attention((out, lse.float()), (want, lse), spread=spread)
