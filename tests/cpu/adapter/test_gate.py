"""The indexer's gate with SGLang's LoRA wrapper: float32 in every row, and an adapter only where a request has one."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.layers import ReplicatedLinearWithLoRA

from sglang_dsa_plugin.adapter import gate

HIDDEN, HEADS, RANK = 96, 8, 4


class Backend(BaseLoRABackend):
    """Adapter 0 for the rows of `has`, added to the layer's output in its dtype, as SGLang's kernels do."""

    def __init__(self, has, info):
        self.has, self.batch_info = has, info
        self.skip_inactive_lora_batches = self.skip_inactive_dense_lora = False

    def get_batch_info(self):
        return self.batch_info

    def run_lora_a_sgemm(self, x, weights, *_, **__):
        return x @ weights[0].t()

    def run_lora_b_sgemm(self, x, weights, *_, base_output, **__):
        base_output[self.has] += (x @ weights[0].t())[self.has]
        return base_output


def case(dtype, active):
    torch.manual_seed(3)
    x = torch.randn(5, HIDDEN, dtype=dtype)
    base = torch.nn.Linear(HIDDEN, HEADS, bias=False, dtype=dtype)
    base.output_size, base.skip_bias_add = HEADS, False
    base.quant_method = SimpleNamespace(apply=lambda layer, x, _bias: torch.nn.functional.linear(x, layer.weight))
    has = torch.tensor([False, True, False, True, False])
    wrapped = ReplicatedLinearWithLoRA(base, Backend(has, SimpleNamespace() if active else None))
    a, b = torch.randn(1, RANK, HIDDEN, dtype=dtype), torch.randn(1, HEADS, RANK, dtype=dtype)
    wrapped.set_lora_info(a, b)
    added = torch.zeros(5, HEADS, dtype=torch.float64)
    if active:
        added[has] = ((x.double() @ a[0].double().t()) @ b[0].double().t())[has]
    return x, base, wrapped, has, added


@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_leaves_the_rows_of_others_as_they_are(dtype, active):
    x, base, wrapped, has, added = case(dtype, active)
    with torch.no_grad():
        plain, found = gate.head_weights(base, x), gate.head_weights(wrapped, x)
    assert plain.dtype == found.dtype == torch.float32
    untouched = ~has if active else torch.ones_like(has)
    assert torch.equal(found[untouched], plain[untouched])
    want = x.double() @ base.weight.detach().double().t() + added
    # The adapter's part has the roundings of its own dtype, twice.
    allowed = (2 ** (-7 if dtype == torch.bfloat16 else -20)) * (added.abs().max() + 1)
    assert (found.double() - want).abs().max() <= allowed
    assert not active or (found[has] - plain[has]).abs().max() > 1


def test_the_gate_of_a_bf16_model_has_more_digits_than_bf16():
    x, _, wrapped, _, _ = case(torch.bfloat16, True)
    with torch.no_grad():
        found = gate.head_weights(wrapped, x)
    assert not torch.equal(found, found.bfloat16().float())
