"""Names and signatures of SGLang that hooks and subclasses rely on, in one table, checked before any hook is queued.

A renamed symbol then stops the server with its name, instead of leaving a hook unapplied and the built-in in place.
"""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

SGLANG_RANGE = SpecifierSet(">=0.5.23,<0.6")
TESTED = "0.5.23"
_SRT = "sglang.srt."


class ContractError(RuntimeError):
    """SGLang is not the one this package was written for; the message lists every mismatch."""


# Methods of ours that SGLang looks for by name, and the module that asks: without the question it would take another
# path, and nothing would fail. And attributes of its objects that are looked at or put in another's place.
_GRAPHS = "model_executor.runner_backend"
ASKED_FOR = (
    ("models.deepseek_common.attention_forward_methods.forward_mha", "prepare_prefill_qkv"),
    ("models.deepseek_common.attention_forward_methods.forward_mla", "self._can_fuse_bmm_into_attention("),
    (f"{_GRAPHS}_utils.breakable_cuda_graph.breakable_cuda_graph", "self._break_fns"),
    ("model_executor.runner.prefill_cuda_graph_runner", "self.capture_num_tokens"),
    *((f"{_GRAPHS}.breakable_cuda_graph_backend", f"self.{name}[") for name in ("_graphs", "_outputs")),
    (f"{_GRAPHS}.breakable_cuda_graph_backend", "self._capture_inputs["),
)


@dataclass(frozen=True)
class Symbol:
    """path below sglang.srt ("module.name" or "module.Class.member"); parameters that must exist, by name."""

    path: str
    parameters: tuple[str, ...] = ()


SYMBOLS: tuple[Symbol, ...] = (
    Symbol("plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type")),
    Symbol("arg_groups.resolution_hooks.register_resolution_hook", ("name",)),
    Symbol("arg_groups.overrides.declare_resolution"),
    Symbol("arg_groups.model_override_base.model_config_of", ("server_args",)),
    Symbol("arg_groups.model_override_base.resolving_view"),
    Symbol("arg_groups.model_override_base.attention_backends_of"),
    Symbol("arg_groups.model_hook.handle_model_specific_adjustments", ("server_args",)),
    Symbol("arg_groups.platform_hook.handle_cpu_backends", ("server_args",)),
    Symbol("model_executor.cuda_graph_config.with_phase"),
    Symbol("platforms.interface.SRTPlatform.get_kv_pool_cls", ("kind",)),
    Symbol("platforms.interface.SRTPlatform.post_load_model", ("model",)),
    Symbol("platforms.cpu.CpuDeviceMixin"),
    Symbol("platforms.cuda.CudaSRTPlatform"),
    Symbol("layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata", ("forward_batch",)),
    Symbol(
        "layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_out_graph",
        ("forward_batch", "in_capture"),
    ),
    Symbol("layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_in_graph", ("forward_batch",)),
    Symbol("layers.attention.base_attn_backend.AttentionBackend.init_cuda_graph_state", ("max_bs", "max_num_tokens")),
    Symbol("layers.attention.base_attn_backend.AttentionBackend.get_cuda_graph_seq_len_fill_value"),
    Symbol("model_executor.forward_batch_info.ForwardBatch.get_max_chunk_capacity"),
    Symbol(
        "layers.attention.dsa_backend.DeepseekSparseAttnBackend",
        ("model_runner", "skip_prefill", "speculative_step_id", "topk", "speculative_num_steps"),
    ),
    Symbol("layers.attention.dsa_backend.DeepseekSparseAttnMultiStepBackend", ("model_runner",)),
    Symbol(
        "layers.attention.dsa.dsa_indexer.Indexer",
        (
            "hidden_size",
            "index_n_heads",
            "index_head_dim",
            "rope_head_dim",
            "index_topk",
            "q_lora_rank",
            "max_position_embeddings",
            "rope_theta",
            "layer_id",
            "scale_fmt",
            "block_size",
            "rope_scaling",
            "is_neox_style",
            "prefix",
            "quant_config",
            "alt_stream",
            "config",
        ),
    ),
    Symbol("layers.attention.dsa.dsa_indexer_kpool.IndexerKPool"),
    Symbol("models.deepseek_common.attention_backend_handler.handle_attention_dsa"),
    Symbol("lora.layers.BaseLayerWithLoRA.lora_active"),
    Symbol(
        "lora.backend.base_backend.BaseLoRABackend.forward_with_base",
        ("layer", "x", "base_fn", "lora_a", "lora_b", "output_offset", "offsets"),
    ),
    Symbol("layers.rotary_embedding.factory.get_rope_cpu", ("rope_scaling", "device")),
    Symbol("layers.rotary_embedding.factory.get_rope"),
    Symbol("layers.rotary_embedding.base.RotaryEmbedding._compute_cos_sin_cache"),
    Symbol("layers.rotary_embedding.base.RotaryEmbedding._compute_inv_freq", ("base",)),
    Symbol("mem_cache.kv_cache_configurator.calculate_mla_kv_cache_dim", ("model_config", "kv_cache_dtype")),
    Symbol("mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes", ("pre_model_load_memory",)),
    Symbol(
        "model_executor.pool_configurator.DefaultPoolConfigurator._compute_dsa_indexer_cell_size", ("kvc", "num_layers")
    ),
    Symbol(
        "mem_cache.memory_pool.DSATokenToKVPool",
        ("size", "page_size", "kv_lora_rank", "dtype", "kv_cache_dim", "skip_topk_layers"),
    ),
    Symbol("mem_cache.memory_pool.DSATokenToKVPool._create_index_key_cache"),
    Symbol("mem_cache.memory_pool.DSATokenToKVPool._should_allocate_index_layer"),
    Symbol(
        "mem_cache.memory_pool.DSATokenToKVPool._write_mla_kv_buffer",
        ("dst_buffer", "loc", "cache_k_nope", "cache_k_rope"),
    ),
    Symbol("mem_cache.memory_pool.KVWriteLoc.for_batch", ("forward_batch",)),
    Symbol("mem_cache.memory_pool.unwrap_write_loc"),
    Symbol("model_executor.forward_context.get_attn_backend"),
    Symbol("model_executor.forward_context.get_token_to_kv_pool"),
    Symbol("state_capturer.indexer_topk.maybe_capture_indexer_topk", ("layer_id", "topk_indices")),
    Symbol("utils.numa_utils.get_cpu_ids_by_node"),
    Symbol("model_executor.model_runner_components.moe_ep_setup.check_quantized_moe_compatibility", ("model_config",)),
    Symbol("entrypoints.warmup.warmup", ("name",)),
    Symbol("entrypoints.engine._wait_for_scheduler_ready", ("scheduler_pipe_readers", "scheduler_procs")),
    Symbol("managers.scheduler.Scheduler.__init__"),
    Symbol("managers.io_struct.GenerateReqInput", ("input_ids", "sampling_params")),
    Symbol("layers.quantization.fp8.Fp8Config", ("is_checkpoint_fp8_serialized", "weight_block_size")),
    Symbol("layers.quantization.unquant.UnquantizedLinearMethod.create_weights", ("layer",)),
    Symbol("layers.quantization.unquant.UnquantizedFusedMoEMethod.forward_native", ("layer", "dispatch_output")),
    Symbol("model_executor.runner_backend_utils.breakable_cuda_graph.eager_on_graph"),
    Symbol("model_executor.runner_backend_utils.breakable_cuda_graph.is_in_breakable_cuda_graph"),
    Symbol("model_executor.runner_utils.forward_batch.get_forward_batch"),
    Symbol(
        "model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend.capture_one",
        ("shape_key", "forward_fn", "capture_inputs", "post_warmup_hook"),
    ),
    Symbol(
        "model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend.replay",
        ("shape_key", "static_forward_batch"),
    ),
    Symbol("model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"),
    Symbol("model_executor.runner.shape_key.ShapeKey", ("size", "attention_variant")),
    Symbol("layers.radix_attention.RadixAttention", ("use_prefill_attention_wrapper",)),
    Symbol(
        "layers.quantization.unquant.UnquantizedFusedMoEMethod",
        ("use_triton_kernels", "use_flashinfer_trtllm_moe", "use_deep_gemm"),
    ),
    Symbol("connector.ConnectorType.INSTANCE"),
    Symbol("constants.GPU_MEMORY_TYPE_KV_CACHE"),
    Symbol("environ.envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"),
    Symbol("environ.envs.SGLANG_DSA_TOPK_BROADCAST"),
    Symbol("layers.linear.LinearBase"),
    Symbol(
        "layers.linear.ReplicatedLinear",
        ("input_size", "output_size", "bias", "params_dtype", "quant_config", "prefix"),
    ),
    Symbol("layers.moe.fused_moe_triton.FusedMoE"),
    Symbol("layers.quantization.base_config.QuantizeMethodBase"),
    Symbol("layers.rotary_embedding.get_rope", ("rotary_dim", "max_position", "base", "rope_scaling", "is_neox_style")),
    Symbol("model_executor.cuda_graph_config.Backend"),
    Symbol("model_executor.cuda_graph_config.Phase"),
    Symbol("model_executor.runner_backend_utils.breakable_cuda_graph.context.is_in_breakable_cuda_graph"),
    Symbol("model_loader.weight_utils.RUNAI_STREAMER_TENSOR_ATTR"),
    Symbol("platforms.device_mixin.PlatformEnum.CPU"),
    Symbol("platforms.interface.PlatformCapabilities"),
    Symbol("plugins.hook_registry.HookType.REPLACE"),
    Symbol("runtime_context.get_exec"),
    Symbol("runtime_context.get_flags"),
    Symbol("runtime_context.get_parallel"),
    Symbol("state_capturer.indexer_topk.get_global_indexer_capturer"),
    Symbol("utils.add_prefix"),
    Symbol("utils.parse_connector_type"),
)

# Resolution steps this package wraps: a step that was renamed would simply never be called.
STEPS = (
    "handle_deprecated_dp_attention",
    "handle_cuda_graph_config",
    "handle_cpu_backends",
    "handle_model_specific_adjustments",
    "handle_other_validations",
    "validate_deepep_v2_dispatch_token_budget",
)


def problems() -> list[str]:
    """Every mismatch in words; empty when SGLang is as expected."""
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        return [f"sglang is not installed; install sglang=={TESTED}"]
    if not SGLANG_RANGE.contains(installed, prereleases=True):
        return [f"sglang {installed} is outside the supported range {SGLANG_RANGE}; install sglang=={TESTED}"]
    found = [problem for symbol in SYMBOLS if (problem := _symbol_problem(symbol))]
    from sglang.srt.arg_groups import resolution_hooks

    found += [f"resolution step {s} is gone" for s in STEPS if s not in resolution_hooks._OVERRIDABLE_HOOKS]
    found += [f"{module} no longer asks for {name}" for module, name in ASKED_FOR if not _asks(module, name)]
    return found


def require() -> None:
    """Raise ContractError naming every mismatch, the installed version and the remedy."""
    found = problems()
    if found:
        raise ContractError(
            "; ".join(found)
            + f" (sglang {_installed()} installed, {TESTED} tested; remedy: pip install sglang=={TESTED})"
        )


def _installed() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "not"


def _asks(module: str, name: str) -> bool:
    """Whether the module's source, which is not imported, has the name."""
    spec = importlib.util.find_spec(f"sglang.srt.{module}")
    return spec is not None and spec.origin is not None and name in Path(spec.origin).read_text(encoding="utf-8")


def _symbol_problem(symbol: Symbol) -> str | None:
    try:
        found = pkgutil.resolve_name(_SRT + symbol.path)
    except (ImportError, AttributeError, ValueError) as error:
        return f"{_SRT}{symbol.path} is missing ({type(error).__name__}: {error})"
    missing = [p for p in symbol.parameters if p not in _parameters(found)]
    return f"{_SRT}{symbol.path} lost its parameter {', '.join(missing)}" if missing else None


def _parameters(found: Any) -> set[str]:
    # A class is asked for its own constructor; modules with a metaclass would otherwise hide the parameters.
    return set(inspect.signature(found.__init__ if isinstance(found, type) else found).parameters)
