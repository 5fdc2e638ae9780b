"""cache.layouts: the bytes planned are the bytes of the tensors."""

import pytest
import torch

from sglang_dsa_plugin.cache import layouts


@pytest.mark.parametrize("name", layouts.LATENT_LAYOUTS)
def test_row_bytes_are_in_the_name_and_in_the_tensor(name):
    spec = layouts.LATENT_LAYOUTS[name]
    assert spec.name == name and spec.row_bytes == int(name.rsplit("_", 1)[1])
    row = torch.empty(1, spec.width, dtype=spec.dtype)
    assert row.untyped_storage().nbytes() == spec.row_bytes


@pytest.mark.parametrize(
    "dtype, token_bytes", [(torch.float8_e4m3fn, 132), (torch.bfloat16, 256), (torch.float32, 512)]
)
def test_an_index_page_is_64_tokens(dtype, token_bytes):
    shape, storage = layouts.index_page_shape(dtype)
    page = torch.empty(shape, dtype=storage)
    assert layouts.index_token_bytes(dtype) == token_bytes
    assert page.untyped_storage().nbytes() == layouts.PAGE_SIZE * token_bytes


def test_fp8_is_e4m3_with_its_largest_value():
    assert torch.finfo(layouts.FP8).max == layouts.FP8_MAX
