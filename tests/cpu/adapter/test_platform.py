"""Which platform class is chosen on which machine, by mocked devices; and the thread binding for several ranks on one
node.
"""

import os

import pytest
import torch

from sglang_dsa_plugin.adapter import platform


@pytest.fixture
def machine(monkeypatch):
    """Set what torch reports: machine(cuda=True), machine(hip="6"), machine(xpu=True), ..."""

    def build(cuda: bool = False, hip: str | None = None, **others: bool) -> None:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "a GPU")
        for name in ("xpu", "npu", "mps", "musa"):
            there = others.get(name, False)
            device = type("Device", (), {"is_available": staticmethod(lambda there=there: there)})
            monkeypatch.setattr(torch, name, device, raising=False)

    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.delenv("SGLANG_DSA_PLUGIN", raising=False)
    return build


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ({}, platform.CPU_PLATFORM),
        ({"cuda": True}, platform.CUDA_PLATFORM),
        ({"cuda": True, "hip": "6.4"}, None),
        ({"xpu": True}, None),
        ({"npu": True}, None),
        ({"mps": True}, None),
        ({"musa": True}, None),
    ],
)
def test_platform_by_device(machine, devices, expected):
    machine(**devices)
    assert platform.activate() == expected


@pytest.mark.parametrize("variable", [{"SGLANG_DSA_PLUGIN": "off"}, {"SGLANG_USE_CPU_ENGINE": "1"}])
@pytest.mark.parametrize("cuda", [True, False])
def test_standing_aside(machine, monkeypatch, variable, cuda):
    machine(cuda=cuda)
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    path, reason = platform.choose_platform()
    assert path is None
    assert next(iter(variable)) in reason


def test_both_platform_classes_give_our_pool_for_dsa_only():
    pytest.importorskip("sglang")
    from sglang.srt.platforms.device_mixin import PlatformEnum

    from sglang_dsa_plugin.adapter.platform_cpu import DsaCpuPlatform
    from sglang_dsa_plugin.adapter.platform_cuda import DsaCudaPlatform
    from sglang_dsa_plugin.adapter.pool import DsaPool

    for cls in (DsaCpuPlatform, DsaCudaPlatform):
        assert cls().get_kv_pool_cls(kind="dsa") is DsaPool
        assert cls().get_kv_pool_cls(kind="mla") is None
    assert DsaCudaPlatform()._enum == PlatformEnum.CUDA and not DsaCudaPlatform().is_out_of_tree()
    assert DsaCpuPlatform().is_out_of_tree() and DsaCpuPlatform().get_device() == "cpu"


def test_the_cpu_platform_answers_every_question_sglang_may_ask():
    # A question left to the base class ends the process that asks: /start_profile did.
    pytest.importorskip("sglang")
    import inspect

    from sglang_dsa_plugin.adapter.platform_cpu import DsaCpuPlatform

    unanswered = [
        name
        for name, function in inspect.getmembers(DsaCpuPlatform, inspect.isfunction)
        if any(line.strip() == "raise NotImplementedError" for line in inspect.getsource(function).splitlines())
    ]
    assert unanswered == []
    assert DsaCpuPlatform().get_torch_profiler_activity() == torch.profiler.ProfilerActivity.CPU
    assert DsaCpuPlatform().get_torch_profiler_activity_str() == "CPU"


@pytest.mark.parametrize(
    ("ranks", "nodes", "cores", "expected"),
    [
        (2, 1, [0, 1], "0|1"),
        (2, 1, [0, 1, 2, 3], "0,1|2,3"),
        (4, 1, [0, 1], "0|1|0|1"),
        (3, 1, [4, 5, 6, 7], "4|5|6"),
        (1, 1, [0, 1], None),
        (2, 2, [0, 1], None),
    ],
)
def test_ranks_beyond_the_numa_nodes_get_cores(monkeypatch, ranks, nodes, cores, expected):
    pytest.importorskip("sglang")
    from sglang.srt.utils import numa_utils

    from sglang_dsa_plugin.adapter.hooks import cpu_backend

    monkeypatch.setattr(numa_utils, "get_cpu_ids_by_node", lambda: ["0"] * nodes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    monkeypatch.setenv(cpu_backend.BIND, "")
    cpu_backend.bind_threads(ranks)
    assert (os.environ[cpu_backend.BIND] or None) == expected


def test_the_users_own_binding_stays(monkeypatch):
    pytest.importorskip("sglang")
    from sglang_dsa_plugin.adapter.hooks import cpu_backend

    monkeypatch.setenv(cpu_backend.BIND, "0|0")
    cpu_backend.bind_threads(2)
    assert os.environ[cpu_backend.BIND] == "0|0"
