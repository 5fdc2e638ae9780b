"""The CPU platform: SGLang's own CPU device operations plus this package's KV pool, for machines without an
accelerator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from torch.profiler import ProfilerActivity


class DsaCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out-of-tree, so that SGLang takes its device-independent torch paths: its in-tree CPU engine needs compiled
    operators that the released wheel lacks."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:  # type: ignore[override]
        """A string: the default of --device is taken from here and split at a colon (arg_groups/serving_hook.py)."""
        return "cpu"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        """For models without DSA; DSA models get "dsa" from hooks/cpu_backend.py."""
        return "torch_native"

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        return dsa_pool_class() if kind == "dsa" else None

    def get_quantization_config(self, quantization: str) -> type[QuantizationConfig] | None:
        """Block-fp8 checkpoints (the published format) are dequantised at load; SGLang's fp8 linear is a GPU kernel."""
        if quantization != "fp8":
            return None
        from sglang_dsa_plugin.adapter.fp8_weights import DequantisedFp8Config

        return DequantisedFp8Config

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return self.get_default_attention_backend()

    def get_torch_profiler_activity_str(self) -> str:
        """Asked by /start_profile of every out-of-tree platform; without an answer the request ends the server."""
        return "CPU"

    def get_torch_profiler_activity(self) -> ProfilerActivity:
        from torch.profiler import ProfilerActivity

        return ProfilerActivity.CPU

    def post_load_model(self, model: torch.nn.Module) -> None:
        check_loaded_model(model)


def dsa_pool_class() -> type:
    """The KV pool class; imported late, because platforms are resolved while sglang is still importing."""
    from sglang_dsa_plugin.adapter.pool import DsaPool

    return DsaPool


def check_loaded_model(model: torch.nn.Module) -> None:
    """Check, in the process that will run it, that the loaded model's attention is this package's."""
    from sglang_dsa_plugin.adapter import selfcheck

    selfcheck.check_model(model)
