"""ops.mha_keys: keys of every head from their own parts and the rope that all share."""

import pytest
import torch

from sglang_dsa_plugin.ops import mha_keys


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(0, 3, 8), (1, 1, 8), (5, 3, 128), (2, 16, 192)])
def test_every_head_gets_its_own_part_and_the_shared_one(tokens, heads, width, dtype):
    expanded = torch.randn(tokens, heads, width + 32).to(dtype)
    rope = torch.randn(tokens, 100).to(dtype)[:, 36:]
    got = mha_keys.join(expanded[..., :width], rope)
    assert got.shape == (tokens, heads, width + 64) and got.is_contiguous() and got.dtype == dtype
    assert torch.equal(got, mha_keys.reference(expanded[..., :width], rope))
    for head in range(heads):
        assert torch.equal(got[:, head, width:], rope)


@pytest.mark.parametrize(
    ("nope", "rope", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), r"nope must be .*shape \[\*, \*, \*\], got float32 \[2, 3\]"),
        (torch.zeros(2, 3, 8), torch.zeros(3, 4), r"rope must be .*shape \[2, \*\], got float32 \[3, 4\]"),
        (torch.zeros(2, 3, 8), torch.zeros(2, 4).half(), "rope must be a float32 tensor"),
        (torch.zeros(2, 3, 8, dtype=torch.int32), torch.zeros(2, 4), "nope must be a bfloat16/float32/float16 tensor"),
        (torch.zeros(2, 3, 16)[..., ::2], torch.zeros(2, 4), "nope must be contiguous in its last dimension"),
        (torch.zeros(2, 3, 0), torch.zeros(2, 4), r"nope must be at least 1 wide, got float32 \[2, 3, 0\]"),
        (torch.zeros(2, 3, 8), torch.zeros(2, 0), r"rope must be at least 1 wide, got float32 \[2, 0\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(nope, rope, message):
    with pytest.raises(ValueError, match="mha_keys: " + message):
        mha_keys.join(nope, rope)
