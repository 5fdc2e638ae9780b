"""The `sglang.srt.platforms` entry point: which platform class serves this machine, or None to stand aside.

SGLang imports this module while it is itself being imported, so nothing of sglang may be imported here.
"""

from __future__ import annotations

import os

CPU_PLATFORM = "sglang_dsa_plugin.adapter.platform_cpu.DsaCpuPlatform"
CUDA_PLATFORM = "sglang_dsa_plugin.adapter.platform_cuda.DsaCudaPlatform"


def activate() -> str | None:
    """Class path of the platform for this machine.

    CUDA (not ROCm): a subclass of SGLang's CUDA platform that only adds the KV pool. No accelerator at all: a CPU
    platform. None on ROCm, XPU, NPU, MPS and MUSA, with SGLANG_USE_CPU_ENGINE=1 (SGLang's own CPU engine) and with
    SGLANG_DSA_PLUGIN=off.
    """
    return choose_platform()[0]


def choose_platform() -> tuple[str | None, str]:
    """The class path and the reason in words (also shown by the doctor)."""
    from sglang_dsa_plugin import settings

    try:
        enabled = settings.plugin_enabled()
    except ValueError:
        return None, "SGLANG_DSA_PLUGIN has a bad value; the plugin refuses to start"
    if not enabled:
        return None, "SGLANG_DSA_PLUGIN=off"
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None, "SGLANG_USE_CPU_ENGINE=1 asks for SGLang's own CPU engine"
    import torch

    if torch.version.hip is not None:
        return None, "ROCm is left to SGLang"
    if torch.cuda.is_available():
        return CUDA_PLATFORM, f"CUDA device {torch.cuda.get_device_name(0)}"
    for name in ("xpu", "npu", "mps", "musa"):
        if _available(getattr(torch, name, None)):
            return None, f"{name.upper()} is left to SGLang"
    return CPU_PLATFORM, "no accelerator found"


def _available(module: object) -> bool:
    check = getattr(module, "is_available", None)
    return bool(check()) if callable(check) else False
