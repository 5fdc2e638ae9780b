"""Byte-level description of what the two caches hold.

Latent row (one per token and layer), 512 nope values then 64 rope values:

| layout    | dtype    | row                                                                              | bytes |
| --------- | -------- | -------------------------------------------------------------------------------- | ----- |
| bf16_1152 | bfloat16 | 576 values                                                                       | 1152  |
| fp32_2304 | float32  | 576 values (models that run in float32)                                          | 2304  |
| fp8_656   | uint8    | 512 e4m3, 4 f32 scales (one per 128 values), 64 bf16 rope (FlashMLA's V3.2 row)   | 656   |
| fp8_576   | e4m3     | 576 values times one `kv_scale` for the whole cache (trtllm, tilelang)            | 576   |

Index page (64 tokens of one indexing layer): `fp8`: uint8 [8448] = 64 x 128 e4m3 keys, then 64 f32 scales, so a token
costs 132 bytes; or the model's dtype, [64, 128].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LATENT_DIM = 512
ROPE_DIM = 64
ROW_DIM = LATENT_DIM + ROPE_DIM
INDEX_DIM = 128
PAGE_SIZE = 64
QUANT_BLOCK = 128
INDEX_PAGE_BYTES = PAGE_SIZE * (INDEX_DIM + 4)
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True)
class LatentLayout:
    """How one latent row is stored: `width` elements of `dtype`, `row_bytes` bytes."""

    name: str
    dtype: torch.dtype
    width: int

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


LATENT_LAYOUTS: dict[str, LatentLayout] = {
    layout.name: layout
    for layout in (
        LatentLayout("bf16_1152", torch.bfloat16, ROW_DIM),
        LatentLayout("fp32_2304", torch.float32, ROW_DIM),
        LatentLayout("fp8_656", torch.uint8, LATENT_DIM + LATENT_DIM // QUANT_BLOCK * 4 + ROPE_DIM * 2),
        LatentLayout("fp8_576", FP8, ROW_DIM),
    )
}


def index_page_shape(key_dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape of one index page and its storage dtype, for keys of `key_dtype` (fp8 e4m3 or the model's dtype)."""
    if key_dtype == FP8:
        return (INDEX_PAGE_BYTES,), torch.uint8
    return (PAGE_SIZE, INDEX_DIM), key_dtype


def index_token_bytes(key_dtype: torch.dtype) -> int:
    """Bytes of one token's index key in one indexing layer: 132 for fp8, 128 * itemsize otherwise."""
    return INDEX_DIM + 4 if key_dtype == FP8 else INDEX_DIM * key_dtype.itemsize
