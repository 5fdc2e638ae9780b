"""Block-fp8 loading: real SGLang layers built for an fp8 checkpoint end up bit-equal to the same layers loaded from
dequantised weights; tensors that do not belong together are refused by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_context, get_parallel

from sglang_dsa_plugin.adapter.fp8_weights import DequantisedFp8Config, dequantise
from sglang_dsa_plugin.adapter.hooks.cpu_fp8_blocks import without_blocks

E4M3 = torch.float8_e4m3fn
PUBLISHED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
}
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def server_context():
    with get_context().override_server_args():
        yield


def config(**changes) -> DequantisedFp8Config:
    return DequantisedFp8Config.from_config(PUBLISHED | changes)


def parallel(rank: int, size: int):
    return get_parallel().override(
        tp_rank=rank, tp_size=size, attn_tp_rank=rank, attn_tp_size=size, moe_tp_rank=rank, moe_tp_size=size,
        moe_ep_rank=0, moe_ep_size=1,
    )  # fmt: skip


def block_fp8(n: int, k: int, seed: int = 0, block: tuple[int, int] = (128, 128)):
    """Random e4m3 weight [N, K] and scales that are no powers of two, so that the product rounds."""
    generator = torch.Generator().manual_seed(seed)
    weight = (64 * torch.randn(n, k, generator=generator)).to(E4M3)
    return weight, 0.01 * torch.rand(-(-n // block[0]), -(-k // block[1]), generator=generator) + 1e-4


def by_formula(weight, scale, dtype, block=(128, 128)):
    rows = torch.arange(weight.shape[0]) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    # The f64 product is exact, so the cast is the one rounding f32 multiplication does.
    return (weight.double() * scale.double()[rows][:, columns]).float().to(dtype)


def feed(layer, name, tensor, *args, **kwargs):
    param = dict(layer.named_parameters())[name]
    param.weight_loader(param, tensor, *args, **kwargs)


def pair(layer, weight, scale, *args, swap=False):
    halves = [("weight", weight), ("weight_scale_inv", scale)]
    for name, tensor in reversed(halves) if swap else halves:
        feed(layer, name, tensor, *args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k", "block"), [(128, 128, (128, 128)), (1, 1, (128, 128)), (576, 200, (128, 128)), (37, 129, (16, 64))]
)
def test_dequantise_follows_the_formula(n, k, block, dtype):
    weight, scale = block_fp8(n, k, block=block)
    got = dequantise(weight, scale, block, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, by_formula(weight, scale, dtype, block))


def test_every_finite_code_is_exact_with_a_power_of_two():
    codes = torch.arange(256).to(torch.uint8)
    codes = codes[(codes & 127) != 127].view(E4M3)[None]
    for scale in (2.0**-120, 2.0**-7, 2.0**110):
        got = dequantise(codes, torch.tensor([[scale, scale]]), (1, 128), torch.float32)
        assert torch.equal(got.double(), codes.double() * scale)


def test_scales_stored_as_exponents():
    weight, _ = block_fp8(130, 128)
    scale = torch.tensor([[0.25], [2.0]])
    got = dequantise(weight, scale.to(torch.float8_e8m0fnu), (128, 128), torch.float32)
    assert torch.equal(got, by_formula(weight, scale, torch.float32))


@pytest.mark.parametrize(("wshape", "sshape"), [((256, 128), (1, 1)), ((256, 128), (2, 2)), ((256,), (2,)), ((4,), ())])
def test_shapes_that_do_not_belong_together(wshape, sshape):
    with pytest.raises(ValueError, match=r"scales \[ceil\(N / 128\).*got weight.*weight_block_size"):
        dequantise(torch.zeros(wshape).to(E4M3), torch.ones(sshape), (128, 128), torch.float32)


KINDS = {"replicated": ReplicatedLinear, "column": ColumnParallelLinear, "row": RowParallelLinear}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("kind", KINDS)
def test_linear_equals_its_dequantised_twin(kind, size, dtype):
    # 200 and 328 are cut in the middle of a block on two ranks, and their last blocks are ragged.
    weight, scale = block_fp8(200, 328)
    exact = by_formula(weight, scale, dtype)
    for rank in range(size):
        with parallel(rank, size):
            options = {"bias": False, "params_dtype": dtype}
            ours = KINDS[kind](328, 200, quant_config=config(), prefix="model.layers.0.proj", **options)
            twin = KINDS[kind](328, 200, **options)
        pair(ours, weight, scale, swap=bool(rank))
        feed(twin, "weight", exact)
        # Before any post-processing: SGLang splits kv_b_proj at this point.
        assert ours.weight.dtype == dtype
        assert torch.equal(ours.weight, twin.weight)
        ours.quant_method.process_weights_after_loading(ours)
        x = torch.randn(3, ours.weight.shape[1]).to(dtype)
        assert torch.equal(ours.quant_method.apply(ours, x), twin.quant_method.apply(twin, x))


@pytest.mark.parametrize("size", (1, 2))
def test_merged_gate_and_up(size):
    gate, up = block_fp8(144, 136, seed=1), block_fp8(144, 136, seed=2)
    for rank in range(size):
        with parallel(rank, size):
            ours = MergedColumnParallelLinear(136, [144, 144], bias=False, quant_config=config(), prefix="mlp.gate_up")
            twin = MergedColumnParallelLinear(136, [144, 144], bias=False)
        feed(ours, "weight", gate[0], 0)
        feed(ours, "weight", up[0], 1)
        feed(ours, "weight_scale_inv", up[1], 1)
        feed(ours, "weight_scale_inv", gate[1], 0)
        for shard, half in enumerate((gate, up)):
            feed(twin, "weight", by_formula(*half, torch.float32), shard)
        ours.quant_method.process_weights_after_loading(ours)
        assert torch.equal(ours.weight, twin.weight)


EXPERTS, HIDDEN, INNER = 3, 136, 192
SHARDS = {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}


def moe(dtype, rank=0, size=1, quant_config=None):
    with parallel(rank, size):
        return FusedMoE(
            EXPERTS, HIDDEN, INNER, layer_id=1, top_k=2, quant_config=quant_config, params_dtype=dtype,
            prefix="model.layers.1.mlp.experts",
        )  # fmt: skip


def expert_tensors():
    seed = 0
    for expert in range(EXPERTS):
        for shard, (n, k) in SHARDS.items():
            seed += 1
            yield expert, shard, *block_fp8(n, k, seed)


def feed_expert(layer, expert, shard, tensor, suffix=""):
    name = ("w2_weight" if shard == "w2" else "w13_weight") + suffix
    feed(layer, name, tensor, f"model.layers.1.mlp.experts.{name}", shard_id=shard, expert_id=expert)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", (1, 2))
def test_experts_equal_their_dequantised_twins(size, dtype):
    tensors = list(expert_tensors())
    for rank in range(size):
        ours, twin = moe(dtype, rank, size, config()), moe(dtype, rank, size)
        # As SGLang does: from threads, all weights before all scales at worst.
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(feed_expert, ours, e, s, weight) for e, s, weight, _ in tensors]
            jobs += [pool.submit(feed_expert, ours, e, s, scale, "_scale_inv") for e, s, _, scale in tensors]
        for job in jobs:
            job.result()
        for expert, shard, weight, scale in tensors:
            feed_expert(twin, expert, shard, by_formula(weight, scale, dtype))
        for layer in (ours, twin):
            layer.quant_method.process_weights_after_loading(layer)
        assert ours.w13_weight.dtype == dtype
        assert torch.equal(ours.w13_weight, twin.w13_weight)
        assert torch.equal(ours.w2_weight, twin.w2_weight)
        x = torch.randn(5, HIDDEN).to(dtype)
        picks = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]], dtype=torch.int32)
        routed = StandardTopKOutput(torch.rand(5, 2), picks, torch.zeros(5, EXPERTS))
        outputs = [
            layer.quant_method.apply(layer, StandardDispatchOutput(x.clone(), None, routed)).hidden_states
            for layer in (ours, twin)
        ]
        assert outputs[0].abs().max() > 0
        assert torch.equal(*outputs)


def linear(**options) -> ReplicatedLinear:
    return ReplicatedLinear(
        256, 128, bias=False, params_dtype=torch.float32, quant_config=options.pop("quant_config", None) or config(),
        prefix="model.layers.0.self_attn.indexer.wk",
    )  # fmt: skip


@pytest.mark.parametrize("excluded", (None, ["model.layers.0.self_attn.indexer.wk"], ["layers.0.self_attn.indexer"]))
@pytest.mark.parametrize("key", ("modules_to_not_convert", "ignored_layers"))
def test_unquantised_weight_in_an_fp8_checkpoint(key, excluded):
    layer = linear(quant_config=config(**{key: excluded}))
    weight = torch.randn(128, 256).bfloat16()
    feed(layer, "weight", weight)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer.weight, weight.float())


def test_both_forms_of_one_weight_agree():
    weight, scale = block_fp8(128, 256)
    quantised, plain = linear(), linear()
    pair(quantised, weight, scale)
    feed(plain, "weight", by_formula(weight, scale, torch.float32))
    assert torch.equal(quantised.weight, plain.weight)


def test_weights_load_again_into_a_running_model():
    layer = linear()
    for seed in (1, 2):
        weight, scale = block_fp8(128, 256, seed)
        pair(layer, weight, scale, swap=seed == 2)
        layer.quant_method.process_weights_after_loading(layer)
        assert torch.equal(layer.weight, by_formula(weight, scale, torch.float32))


def test_no_fp8_copy_is_kept():
    layer = linear()
    pair(layer, *block_fp8(128, 256))
    assert sum(p.numel() * p.element_size() for p in layer.parameters()) == 4 * 128 * 256
    assert not layer.quant_method.pairs._waiting


def test_streamed_tensors_are_copied():
    weight, scale = block_fp8(128, 256)
    expected = by_formula(weight, scale, torch.float32)
    weight._sglang_runai_streamer_tensor = True
    layer = linear()
    feed(layer, "weight", weight)
    weight.view(torch.uint8).zero_()
    feed(layer, "weight_scale_inv", scale)
    assert torch.equal(layer.weight, expected)


def test_weight_without_scale():
    layer = linear()
    feed(layer, "weight", block_fp8(128, 256)[0])
    with pytest.raises(ValueError, match=r"0\.self_attn\.indexer\.wk\.weight: .*e4m3 weight but no weight_scale_inv"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("unquantised", (False, True))
def test_scale_without_weight(unquantised):
    layer = linear()
    if unquantised:
        feed(layer, "weight", torch.zeros(128, 256))
    feed(layer, "weight_scale_inv", block_fp8(128, 256)[1])
    with pytest.raises(ValueError, match=r"indexer\.wk\.weight: .*weight_scale_inv but no e4m3 weight"):
        layer.quant_method.process_weights_after_loading(layer)


def test_one_expert_without_its_scale():
    layer = moe(torch.float32, quant_config=config())
    for expert, shard, weight, scale in expert_tensors():
        feed_expert(layer, expert, shard, weight)
        if (expert, shard) != (2, "w3"):
            feed_expert(layer, expert, shard, scale, "_scale_inv")
    with pytest.raises(ValueError, match=r"experts.*w13_weight, expert_id 2, shard_id w3.*no weight_scale_inv"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("dtype", (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int8))
def test_other_eight_bit_formats(dtype):
    with pytest.raises(ValueError, match=rf"indexer\.wk\.weight: expected torch\.float8_e4m3fn .*got {dtype}"):
        feed(linear(), "weight", torch.zeros(128, 256).to(dtype))


def test_scale_of_another_shape_names_the_weight():
    layer = linear()
    feed(layer, "weight", block_fp8(128, 256)[0])
    with pytest.raises(
        ValueError, match=r"indexer\.wk\.weight: expected .*got weight \[128, 256\] with scales \[1, 1\]"
    ):
        feed(layer, "weight_scale_inv", torch.ones(1, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_scheme": "static"}, "activation_scheme: expected 'dynamic' on a CPU, got 'static'"),
        ({"weight_block_size": None}, "weight_block_size: expected two block sizes .* got None"),
        ({"weight_block_size": [128]}, r"weight_block_size: .*got \[128\]"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size: .*got \[128, 0\]"),
        ({"hf_config": SimpleNamespace(q_lora_rank=200)}, "q_lora_rank: expected a multiple of the block size 128"),
    ],
)
def test_config_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_online_quantisation_is_refused():
    with pytest.raises(ValueError, match="--quantization fp8: the checkpoint is not stored in fp8"):
        DequantisedFp8Config()


def test_sglang_finds_this_config_on_a_cpu():
    if torch.cuda.is_available():
        pytest.skip("the CPU platform is not in use")
    assert current_platform.is_out_of_tree()
    found = get_quantization_config("fp8")
    assert found is DequantisedFp8Config
    assert set(DTYPES) <= set(found.get_supported_act_dtypes())


def test_sizes_are_not_padded_to_blocks():
    from sglang.srt.configs.update_config import get_moe_padding_size

    made = config(hf_config=SimpleNamespace(q_lora_rank=1536))
    assert made.get_name() == "fp8"
    assert get_moe_padding_size(made.weight_block_size) == get_moe_padding_size(None)


@pytest.mark.parametrize("quantization", ("fp8", "w8a8_fp8"))
def test_ranks_need_no_whole_blocks(quantization):
    from sglang.srt.model_executor.model_runner_components.moe_ep_setup import check_quantized_moe_compatibility

    original = getattr(check_quantized_moe_compatibility, "__wrapped__", check_quantized_moe_compatibility)
    model = SimpleNamespace(
        quantization=quantization,
        hf_config=SimpleNamespace(quantization_config=PUBLISHED),
        hf_text_config=SimpleNamespace(moe_intermediate_size=192),
    )
    sizes = {"tp_size": 2, "moe_ep_size": 1, "moe_dp_size": 1}
    with pytest.raises(ValueError, match="weight_block_size_n=128"):
        original(model_config=model, **sizes)
    if quantization == "fp8":
        without_blocks(original, model_config=model, **sizes)
    else:
        with pytest.raises(ValueError, match="weight_block_size_n=128"):
            without_blocks(original, model_config=model, **sizes)
