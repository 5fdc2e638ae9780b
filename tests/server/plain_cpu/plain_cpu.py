"""A CPU platform as any other package might bring it: SGLang's device operations and nothing else."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class PlainCpu(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_device(self, device_id=0):
        return "cpu"

    def is_pin_memory_available(self, device=None):
        return False

    def get_default_attention_backend(self):
        return "torch_native"


def activate():
    return "plain_cpu.PlainCpu"
