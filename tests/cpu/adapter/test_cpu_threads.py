"""A CPU's threads by step: one for decode of a small model, all for everything else."""

import pytest
import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.adapter import cpu_threads


@pytest.fixture(autouse=True)
def four_threads(monkeypatch):
    monkeypatch.delenv("SGLANG_DSA_PLUGIN_DECODE_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def model(mib: int) -> torch.nn.Module:
    made = torch.nn.Module()
    made.weight = torch.nn.Parameter(torch.empty(mib << 20, dtype=torch.uint8), requires_grad=False)
    return made


def test_decode_of_a_small_model_takes_one_thread_and_the_next_step_all():
    threads = cpu_threads.StepThreads(model(100))
    for rows, want in ((1, 1), (None, 4), (15, 1), (16, 4), (1, 1)):
        threads.set(rows)
        assert torch.get_num_threads() == want
    assert threads.describe() == (
        "decode of fewer than 16 requests on 1 of 4 threads, since the weights are only 100 MiB"
    )


def test_the_kernel_for_one_thread_is_taken_where_steps_run_on_one():
    threads = cpu_threads.StepThreads(model(1))
    for rows in range(1, 40):
        compiled = support.choose("sparse_mla", device="cpu", heads=16, rows=rows, packages="all").name == "numba"
        assert compiled == (threads.for_decode(rows) == 1), rows


def test_larger_weights_are_read_by_all_threads():
    threads = cpu_threads.StepThreads(model(129))
    threads.set(1)
    assert torch.get_num_threads() == 4
    assert threads.describe() == "every step on 4 threads"


@pytest.mark.parametrize(("asked", "used"), [("3", 3), ("9", 4)])
def test_the_setting_decides(monkeypatch, asked, used):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_DECODE_THREADS", asked)
    threads = cpu_threads.StepThreads(model(1))
    threads.set(1)
    assert torch.get_num_threads() == used
    assert f"decode on {used} of 4 threads" in threads.describe()


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_another_value_is_refused(monkeypatch, value):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_DECODE_THREADS", value)
    with pytest.raises(ValueError, match=r"SGLANG_DSA_PLUGIN_DECODE_THREADS=.* use auto or a positive whole number"):
        cpu_threads.StepThreads(model(1))
