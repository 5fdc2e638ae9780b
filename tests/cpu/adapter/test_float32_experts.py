"""The factor of routed experts on a GPU, with stand-ins for tensors there: no GPU needed."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

from sglang_dsa_plugin.adapter import state
from sglang_dsa_plugin.adapter.hooks import float32_experts


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("on_gpu", "dtype", "factor", "in_topk", "serving", "want"),
    [
        (True, torch.float32, 2.5, False, True, 2.5),
        (True, torch.float32, 2.5, True, True, 1.0),
        (True, torch.float32, None, False, True, 1.0),
        (True, torch.bfloat16, 2.5, False, True, 1.0),  # the user's own switch
        (False, torch.float32, 2.5, False, True, 1.0),  # on a CPU the model multiplies
        (True, torch.float32, 2.5, False, False, 1.0),  # a model of another kind
    ],
)
def test_the_factor_is_applied_once(monkeypatch, on_gpu, dtype, factor, in_topk, serving, want):
    monkeypatch.setattr(state, "_model_dtype", torch.float32 if serving else None)
    method = SimpleNamespace(moe_runner_config=SimpleNamespace(routed_scaling_factor=factor))
    layer = SimpleNamespace(should_fuse_routed_scaling_factor_in_topk=in_topk)
    answer = StandardCombineInput(
        hidden_states=torch.ones(3, 4, dtype=dtype).as_subclass(OnGpu if on_gpu else torch.Tensor)
    )
    asked = []

    def experts(*given):
        asked.append(given)
        return answer

    found = float32_experts.scaled(experts, method, layer, "tokens")
    assert asked == [(method, layer, "tokens")]
    assert torch.equal(found.hidden_states.as_subclass(torch.Tensor), torch.full((3, 4), want, dtype=dtype))


def test_what_it_stands_on_is_there():
    """The torch form is one of its own name, and the runner's config holds the factor."""
    assert UnquantizedFusedMoEMethod.forward_native is UnquantizedFusedMoEMethod.forward_cpu
    assert "routed_scaling_factor" in MoeRunnerConfig.__dataclass_fields__
