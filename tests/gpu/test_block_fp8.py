"""A block-fp8 model on a GPU answers as its dequantised twin.

SGLang multiplies block-fp8 weights with activations that it rounds to e4m3 in groups of 128 (3 bits of fraction, an
error of 2 to 4 % a value), so answers are near, not equal: the bound is on the root mean square of the difference of
log-probabilities, as a share of how much the twin's vary over the vocabulary. A scale that is left out or taken from
another block moves whole products. Past k the same noise also makes other picks.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_dsa_plugin.tools import make_model
from tests.server.harness import ModelSpec, ServerSpec, random_prompt, running

pytestmark = pytest.mark.gpu
K = 64
# Kernels that DeepGEMM would compile for every shape of this small model take minutes.
ENV = (("SGLANG_ENABLE_JIT_DEEPGEMM", "0"), ("SGLANG_DSA_PLUGIN_WARMUP", "off"))
ARGS = ("--disable-cuda-graph", "--kv-cache-dtype", "bf16")


@dataclass(frozen=True)
class Made(ModelSpec):
    """A checkpoint that lies there already."""

    directory: str = ""

    def path(self) -> Path:
        return Path(self.directory)


def share(got, want):
    """Root mean square of got - want over that of want about each position's mean."""
    return float((got - want).square().mean().sqrt() / (want - want.mean(1, keepdim=True)).square().mean().sqrt())


def test_answers_as_its_twin(tmp_path, record_testsuite_property):
    quantised, twin = tmp_path / "fp8", tmp_path / "twin"
    made = make_model.make_model(
        quantised, heads=16, index_topk=K, layers=3, hidden=256, dtype="bfloat16", quant="fp8-block", twin=twin
    )
    assert any("indexer" in name for name in made.quantized)
    prompts = {"within k": [random_prompt(n, seed=n) for n in (9, 40, K)], "past k": [random_prompt(300, seed=1)]}
    rows = {}
    for name, directory in (("fp8", quantised), ("twin", twin)):
        spec = ServerSpec(f"block-{name}", Made(directory=str(directory)), ARGS, ENV)
        with running(spec, tmp_path / f"{name}.log") as server:
            rows[name] = {what: [server.generate([p])[0].rows for p in some] for what, some in prompts.items()}
    for what, bound in (("within k", 0.2), ("past k", 0.5)):
        worst = max(share(got, want) for got, want in zip(rows["fp8"][what], rows["twin"][what], strict=True))
        record_testsuite_property(f"block fp8, {what}", worst)
        assert worst <= bound, (what, worst)
