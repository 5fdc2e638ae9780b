"""Block-fp8 checkpoints on a CPU: every weight becomes the model's dtype while it is loaded.

The published DeepSeek-V3.2 format stores a linear weight W [N, K] as `weight`, e4m3 [N, K], and `weight_scale_inv`,
f32 [ceil(N / bn), ceil(K / bk)], with blocks of bn x bk = 128 x 128:

    W[n, k] = weight[n, k] * weight_scale_inv[n // bn, k // bk]

One multiplication in f32, then one rounding if the model's dtype is narrower. SGLang multiplies such weights with GPU
kernels, so on a CPU the layers are SGLang's unquantised ones and only loading differs: the loader of a parameter keeps
an e4m3 tensor until its scale is there (or the other way round), dequantises the checkpoint's tensor and hands it to
the ordinary loader. From then on the model is the one a dequantised checkpoint gives, to the last bit. What follows:

- The pair is joined before tensor parallelism slices it, so a slice may cut through a block.
- It happens inside `model.load_weights`, because that ends by splitting kv_b_proj into its two factors, and only
  afterwards SGLang calls `process_weights_after_loading`; an fp8 kv_b_proj would be requantised there, with a loss.
- At no time is there a second copy of the model; the fp8 tensors go one by one.
- The file's dtype decides, tensor by tensor: a bfloat16 weight is loaded as it is, whether or not the config excludes
  its layer (`modules_to_not_convert`), and an e4m3 weight without its scale is refused wherever it appears.
- The scales' parameters are empty and stay, so weights can be loaded again into a running server.

SGLang itself stands in the way of fp8 on a CPU in four places, each answered: the dtypes an fp8 model may have (no
float32: `get_supported_act_dtypes`), the padding of sizes to whole blocks per rank on a CPU (configs/update_config.py
reads `weight_block_size`), the demand for whole blocks per rank (hooks/cpu_fp8_blocks.py) and the fp8 layers. The
minimum GPU capability is not asked without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.model_loader.weight_utils import RUNAI_STREAMER_TENSOR_ATTR

from sglang_dsa_plugin import plan
from sglang_dsa_plugin.config import UnsupportedModel

E4M3 = torch.float8_e4m3fn
SUFFIX = "_scale_inv"
_REMEDY = "serve a block-fp8 or a bfloat16 version of the model"


def dequantise(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """e4m3 [N, K] and its scales [ceil(N / bn), ceil(K / bk)] -> `dtype` [N, K].

    Raises UnsupportedModel when the shapes do not belong together.
    """
    bn, bk = block
    expected = (-(-weight.shape[0] // bn), -(-weight.shape[1] // bk)) if weight.dim() == 2 else None
    if tuple(scale.shape) != expected:
        raise UnsupportedModel(
            f"expected an e4m3 weight [N, K] with scales [ceil(N / {bn}), ceil(K / {bk})], got weight "
            f"{list(weight.shape)} with scales {list(scale.shape)}; check quantization_config.weight_block_size"
        )
    scale = scale.float()
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    # By rows of blocks: whole f32 copies of the largest weights, one per loader thread, would be gigabytes.
    for row, scales in enumerate(scale):
        rows = slice(row * bn, (row + 1) * bn)
        out[rows] = weight[rows].float() * scales.repeat_interleave(bk)[: weight.shape[1]]
    return out


class BlockPairs:
    """The tensors of one layer that wait for their other half.

    SGLang calls the loaders from several threads; the dict operations used here are atomic, and the one thread that
    takes a complete pair out loads it.
    """

    def __init__(self, layer: str, block: tuple[int, int]) -> None:
        self.layer = layer
        self.block = block
        self._waiting: dict[str, dict[str, Any]] = {}

    def weight_loader(self, usual: Callable[..., None]) -> Callable[..., None]:
        """A loader with `usual`'s arguments that loads dequantised values through it."""

        def load(param: torch.nn.Parameter, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if loaded.dtype in (torch.float32, torch.bfloat16, torch.float16):
                usual(param, loaded, *args, **kwargs)
                return
            part = _part(args, kwargs)
            if loaded.dtype != E4M3:
                self._refuse(part, f"expected {E4M3} or an unquantised dtype, got {loaded.dtype}; {_REMEDY}")

            def finish(scale: torch.Tensor) -> None:
                try:
                    values = dequantise(kept, scale, self.block, param.dtype)
                except ValueError as error:
                    self._refuse(part, str(error))
                usual(param, values, *args, **kwargs)

            kept = _keep(loaded)
            self._join(part, "weight", finish)

        return load

    def load_scale(self, param: torch.nn.Parameter, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """The loader of a scale; `param` is the empty parameter that gives it its name."""
        self._join(_part(args, kwargs), "scale", _keep(loaded))

    def scale_parameter(self) -> torch.nn.Parameter:
        """An empty parameter, so that SGLang finds the scale's name in the model."""
        scale = torch.nn.Parameter(torch.empty(0, dtype=torch.float32), requires_grad=False)
        scale.weight_loader = self.load_scale
        return scale

    def require_complete(self) -> None:
        """Raise UnsupportedModel naming the first tensor whose other half never came."""
        for part, found in self._waiting.items():
            have, lack = (
                ("e4m3 weight", "weight_scale_inv") if "weight" in found else ("weight_scale_inv", "e4m3 weight")
            )
            more = f" (and {len(self._waiting) - 1} more in this layer)" if len(self._waiting) > 1 else ""
            self._refuse(
                part, f"the checkpoint has its {have} but no {lack}{more}; the download or conversion is incomplete"
            )

    def _join(self, part: str, half: str, value: Any) -> None:
        found = self._waiting.setdefault(part, {})
        found[half] = value
        if len(found) == 2 and self._waiting.pop(part, None) is not None:
            found["weight"](found["scale"])

    def _refuse(self, part: str, problem: str) -> NoReturn:
        raise UnsupportedModel(f"fp8 weights: {self.layer}.weight{f' [{part}]' if part else ''}: {problem}")


def _part(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Which part of a merged parameter a loader's arguments mean; the same for a weight and its scale."""
    named = [f"{name} {value}" for name, value in sorted(kwargs.items())]
    return ", ".join([str(value).removesuffix(SUFFIX) for value in args] + named)


def _keep(loaded: torch.Tensor) -> torch.Tensor:
    """`loaded`, or a copy where the streamer will overwrite it."""
    return loaded.clone() if getattr(loaded, RUNAI_STREAMER_TENSOR_ATTR, False) else loaded


class DequantisedLinearMethod(UnquantizedLinearMethod):
    """SGLang's unquantised linear layer, loadable from block-fp8 tensors."""

    def __init__(self, pairs: BlockPairs) -> None:
        super().__init__()
        self.pairs = pairs

    def create_weights(self, layer: torch.nn.Module, *args: Any, weight_loader: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, weight_loader=self.pairs.weight_loader(weight_loader), **kwargs)
        layer.register_parameter(f"weight{SUFFIX}", self.pairs.scale_parameter())

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.pairs.require_complete()
        super().process_weights_after_loading(layer)


class DequantisedMoEMethod(UnquantizedFusedMoEMethod):
    """SGLang's unquantised experts, loadable from block-fp8 tensors."""

    def __init__(self, pairs: BlockPairs, layer: FusedMoE) -> None:
        super().__init__(layer.use_triton_kernels, layer.use_flashinfer_trtllm_moe, layer.use_deep_gemm)
        self.pairs = pairs

    def create_weights(self, layer: torch.nn.Module, *args: Any, weight_loader: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, weight_loader=self.pairs.weight_loader(weight_loader), **kwargs)
        for name in ("w13_weight", "w2_weight"):
            layer.register_parameter(f"{name}{SUFFIX}", self.pairs.scale_parameter())

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.pairs.require_complete()
        super().process_weights_after_loading(layer)


class DequantisedFp8Config(Fp8Config):
    """What "quant_method": "fp8" means on a CPU. Refuses the fp8 formats that are not block-fp8, by their key."""

    def __init__(
        self,
        is_checkpoint_fp8_serialized: bool = False,
        activation_scheme: str = "dynamic",
        ignored_layers: list[str] | None = None,
        weight_block_size: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """The keywords SGLang passes. Raises UnsupportedModel, or plan.Refusal, with the key, what is served and what
        came.
        """
        if not is_checkpoint_fp8_serialized:
            raise plan.Refusal(
                "--quantization fp8: the checkpoint is not stored in fp8, and quantising it while loading gains "
                "nothing on a CPU; leave the flag out"
            )
        if activation_scheme != "dynamic":
            raise UnsupportedModel(
                "quantization_config.activation_scheme: expected 'dynamic' on a CPU, got "
                f"{activation_scheme!r}, whose calibrated activation scales would be ignored; {_REMEDY}"
            )
        sizes = weight_block_size or ()
        if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise UnsupportedModel(
                "quantization_config.weight_block_size: expected two block sizes such as [128, 128] on a CPU, got "
                f"{weight_block_size!r} (one scale per tensor or channel is not served); {_REMEDY}"
            )
        super().__init__(is_checkpoint_fp8_serialized, activation_scheme, ignored_layers, list(sizes), **kwargs)
        self.block: tuple[int, int] = (sizes[0], sizes[1])
        # Read by SGLang to pad sizes to whole blocks per rank; here no rank ever holds blocks.
        self.weight_block_size = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DequantisedFp8Config:
        """From config.json's quantization_config, with the model's config under "hf_config"."""
        made = super().from_config(config)
        rank = getattr(config.get("hf_config"), "q_lora_rank", None)
        if rank and rank % made.block[0]:
            # SGLang concatenates q_a_proj and kv_a_proj_with_mqa, weights and scales alike, before they get here.
            raise UnsupportedModel(
                f"q_lora_rank: expected a multiple of the block size {made.block[0]} in an fp8 checkpoint, got {rank}: "
                f"the blocks of kv_a_proj_with_mqa would be taken for others; {_REMEDY}"
            )
        return made

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return DequantisedLinearMethod(BlockPairs(prefix, self.block))
        if isinstance(layer, FusedMoE):
            return DequantisedMoEMethod(BlockPairs(prefix, self.block), layer)
        return super().get_quant_method(layer, prefix)
