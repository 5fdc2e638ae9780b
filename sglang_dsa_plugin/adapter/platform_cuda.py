"""SGLang's CUDA platform with this package's KV pool. Everything else, and every model without DSA, stays as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.platforms.cuda import CudaSRTPlatform

from sglang_dsa_plugin.adapter.platform_cpu import check_loaded_model, dsa_pool_class

if TYPE_CHECKING:
    import torch


class DsaCudaPlatform(CudaSRTPlatform):
    """Keeps `_enum = CUDA`, so `is_out_of_tree()` is False and all CUDA capabilities hold."""

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        return dsa_pool_class() if kind == "dsa" else super().get_kv_pool_cls(kind=kind)

    def post_load_model(self, model: torch.nn.Module) -> None:
        super().post_load_model(model)
        check_loaded_model(model)
