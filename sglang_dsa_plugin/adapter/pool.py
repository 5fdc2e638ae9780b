"""The KV pool SGLang sees: its own class with this package's rows and index pages.

It must subclass `DSATokenToKVPool` (SGLang tests the type in several places) and keeps that class's buffers,
addressing and accounting; what is written into them, read back, moved and copied goes through ops.latent_rows and
cache.index_pages.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, unwrap_write_loc

from sglang_dsa_plugin import plan
from sglang_dsa_plugin.adapter import state
from sglang_dsa_plugin.cache.index_pages import IndexPages, pages_for
from sglang_dsa_plugin.cache.layouts import FP8, LATENT_DIM, LATENT_LAYOUTS, PAGE_SIZE, ROPE_DIM, LatentLayout
from sglang_dsa_plugin.ops import latent_rows


class DsaPool(DSATokenToKVPool):
    """Latent rows per layer (cache/layouts.py) and index pages per indexing layer; slot 0..63 is the padding page."""

    layout: LatentLayout
    index_pages: IndexPages

    def _create_buffers(self) -> None:
        if self.page_size != PAGE_SIZE:
            raise plan.Refusal(f"DsaPool: page_size must be {PAGE_SIZE}, got {self.page_size}; leave --page-size out")
        self.layout = _layout_of(self.dtype, self.kv_cache_dim)
        self._impl_store = plan.forced_impl("latent_rows_store")
        self._impl_load = plan.forced_impl("latent_rows_load")
        super()._create_buffers()
        # Views in the layout's dtype, made once: SGLang stores fp8 as bytes.
        self._rows = [buffer.view(self.layout.dtype).view(-1, self.layout.width) for buffer in self.kv_buffer]

    def _create_index_key_cache(self) -> IndexKeyCacheFacade:
        saver = self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE)
        arena = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.custom_mem_pool else nullcontext()
        with saver, arena:
            owns = [self._should_allocate_index_layer(i) for i in range(self.layer_num)]
            self.index_pages = IndexPages(
                pages_for(self.index_buf_size), owns, state.index_key_dtype(), torch.device(self.device)
            )
        return IndexKeyCacheFacade(self, self.index_pages)

    # Latent rows

    def rows_of(self, layer_id: int) -> torch.Tensor:
        """All rows [N, width] of a layer in the layout's dtype; waits for a running host-to-device transfer of it."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id - self.start_layer)
        return self._rows[layer_id - self.start_layer]

    def _write_mla_kv_buffer(
        self, dst_buffer: torch.Tensor, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        rows = dst_buffer.view(self.layout.dtype).view(-1, self.layout.width)
        latent_rows.store(
            rows,
            loc,
            cache_k_nope.reshape(-1, LATENT_DIM),
            cache_k_rope.reshape(-1, ROPE_DIM),
            self.layout.name,
            impl=self._impl_store,
        )

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None,
        layer_id_override: int | None = None,
    ) -> None:
        """Latent and rope in one tensor [R,1,576], the form the model uses off CUDA; cache_v is not read."""
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        loc, _, _ = unwrap_write_loc(loc_info)
        nope, rope = cache_k.reshape(-1, LATENT_DIM + ROPE_DIM).split([LATENT_DIM, ROPE_DIM], dim=-1)
        rows = self._rows[layer_id - self.start_layer]
        latent_rows.store(rows, loc, nope, rope, self.layout.name, impl=self._impl_store)

    def get_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [R,1,512] and ropes [R,1,64] of slots `loc`, dequantised, in dst_dtype (default: the pool's)."""
        wanted = dst_dtype or self.dtype
        dtype = wanted if wanted.itemsize > 1 else torch.float32
        rows = self.rows_of(layer.layer_id)
        parts = latent_rows.load_parts(rows, loc, self.layout.name, dtype, impl=self._impl_load)
        nope, rope = (part.to(wanted).unsqueeze(1) for part in parts)
        return nope, rope

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy whole tokens, latents and index keys together."""
        if tgt_loc.numel() == 0:
            return
        for rows in self._rows:
            latent_rows.move(rows, src_loc.reshape(-1), tgt_loc.reshape(-1))
        self.index_pages.move(tgt_loc, src_loc)

    # Host copies (retraction)

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> dict[str, Any]:
        chunks = indices.split(self.cpu_offloading_chunk_size)
        return {
            "rows": [[buffer[part].cpu() for part in chunks] for buffer in self.kv_buffer],
            "index": self.index_pages.to_host(indices),
        }

    def load_cpu_copy(
        self,
        kv_cache_cpu_dict: dict[str, Any],
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        chunks = indices.split(self.cpu_offloading_chunk_size)
        for buffer, host in zip(self.kv_buffer, kv_cache_cpu_dict["rows"]):
            for part, rows in zip(chunks, host, strict=True):
                buffer[part] = rows.to(buffer.device)
        self.index_pages.from_host(kv_cache_cpu_dict["index"], indices)


class IndexKeyCacheFacade:
    """What inherited methods of SGLang's pool, HiCache and transfers ask of an index-key cache, by `IndexPages`; not
    `get_k_and_scale`, which serves the built-in indexer's gather alone.
    """

    def __init__(self, pool: DsaPool, pages: IndexPages) -> None:
        self.pool = pool
        self.pages = pages

    @property
    def buffer(self) -> list[torch.Tensor]:
        return self.pages.buffer

    def clear(self) -> None:
        self.pages.clear()

    def get_local_buffer(self, layer_id: int) -> torch.Tensor:
        """Pages of a layer; waits for a running transfer of it."""
        if self.pool.layer_transfer_counter is not None:
            self.pool.layer_transfer_counter.wait_until(layer_id - self.pool.start_layer)
        return self.pages.buffer[layer_id - self.pool.start_layer]

    def store_quantized(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        self.pages.store(layer_id - self.pool.start_layer, loc, index_k, index_k_scale)

    def state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Pointers, lengths and item sizes (one page) of all layers' pages; 0 items where a layer owns none."""
        buffers = self.pages.buffer
        items = [pages[0].nbytes if pages.shape[0] else 0 for pages in buffers]
        return [b.data_ptr() for b in buffers], [b.nbytes for b in buffers], items


def _layout_of(dtype: torch.dtype, width: int) -> LatentLayout:
    """The layout that SGLang's (dtype, kv_cache_dim) stands for; the two come from hooks/kv_sizing.py."""
    for layout in LATENT_LAYOUTS.values():
        if layout.width == width and (layout.dtype == dtype or dtype == FP8 == _values_dtype(layout)):
            return layout
    raise plan.Refusal(
        f"DsaPool: no row layout has {width} elements of {dtype}; known: {', '.join(LATENT_LAYOUTS)}. Use "
        "--kv-cache-dtype "
        "auto, bfloat16 or fp8_e4m3"
    )


def _values_dtype(layout: LatentLayout) -> torch.dtype:
    return FP8 if layout.name.startswith("fp8") else layout.dtype
