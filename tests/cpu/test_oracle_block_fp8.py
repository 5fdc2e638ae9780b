"""The oracle of block-fp8 models: its rounding is that of the formula, and checkpoint and twin stay the same model."""

import torch
from safetensors.torch import load_file

from sglang_dsa_plugin.tools import fp8_checkpoint
from sglang_dsa_plugin.tools.make_model import make_model
from tests.oracle import block_fp8


def test_activations_are_rounded_in_groups_of_128():
    generator = torch.Generator().manual_seed(0)
    x, weight, kept = (torch.randn(n, 256, generator=generator) for n in (5, 7, 7))
    x[0, :128] = 0
    want = torch.zeros(5, 256)
    for row, start in ((row, start) for row in range(5) for start in (0, 128)):
        group = x[row, start : start + 128].double()
        scale = max(float(group.abs().max()), 1e-10) / 448
        want[row, start : start + 128] = ((group / scale).float().to(torch.float8_e4m3fn).double() * scale).float()
    with block_fp8.RoundedActivations([kept]) as mode:
        got, as_it_was = (torch.nn.functional.linear(x, w) for w in (weight, kept))
    assert mode.layers == 1
    # A quotient in float32 may round to the other neighbour in e4m3 where the exact one lies between the two.
    assert torch.allclose(got, want @ weight.T, rtol=0, atol=1e-4)
    assert torch.equal(as_it_was, x @ kept.T)
    assert not torch.allclose(got, x @ weight.T, rtol=0, atol=1e-2)


def test_neighbouring_blocks_differ_in_scale_and_the_twin_follows(tmp_path):
    sizes = {"layers": 1, "hidden": 256, "heads": 2, "index_heads": 2}
    made = make_model(tmp_path / "q", **sizes, quant="fp8-block", twin=tmp_path / "t")
    before = load_file(tmp_path / "q" / "model.safetensors")
    block_fp8.scale_by_place(tmp_path / "q", tmp_path / "t")
    fp8, exact = (load_file(tmp_path / name / "model.safetensors") for name in "qt")
    for name in made.quantized:
        scale = fp8[f"{name}_scale_inv"]
        factor = scale / before[f"{name}_scale_inv"]
        assert (factor[1:] != factor[:-1]).all() and (factor[:, 1:] != factor[:, :-1]).all(), name
        assert torch.equal(fp8_checkpoint.dequantize_blocks(fp8[name], scale), exact[name].float()), name


def test_a_rounded_model_lies_near_its_twin_and_not_on_it(tmp_path):
    sizes = {"layers": 2, "hidden": 256, "heads": 2, "index_heads": 2, "dense_layers": 1, "experts_per_token": 8}
    make_model(tmp_path / "q", **sizes, quant="fp8-block", twin=tmp_path / "t")
    plain, rounded = (block_fp8.logprobs(tmp_path / "t", list(range(1, 30)), rounded) for rounded in (False, True))
    assert 0.02 < float((plain - rounded).std() / plain.std()) < 0.3
