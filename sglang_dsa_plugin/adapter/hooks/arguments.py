"""Arguments of a DSA model: refuse what is not served, then declare what the plan says.

Why: SGLang's step for these models reads a CUDA capability unconditionally, overrides the user's page size without a
word and chooses kernels by GPU alone. Here the config is read (and refused by key) before anything is built, flags are
checked by name, and the plan's KV dtype is declared last.
Upstream: arg_groups/model_hook.py, handle_model_specific_adjustments (the capability read: line 341; overrides.py 512,
631). Can go: never wholly (the refusals are ours); the capability shield goes when those reads are guarded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

from sglang_dsa_plugin import plan, settings, support
from sglang_dsa_plugin.adapter import config_file, refusals
from sglang_dsa_plugin.adapter.hooks import worker_refusals
from sglang_dsa_plugin.backend import dense_fallback
from sglang_dsa_plugin.cache.layouts import PAGE_SIZE
from sglang_dsa_plugin.config import DsaConfig, UnsupportedModel, is_dsa_config
from sglang_dsa_plugin.config_rope import past_the_end
from sglang_dsa_plugin.kernel_flags import KernelFlags, declared
from sglang_dsa_plugin.served_flags import NOT_SERVED

logger = logging.getLogger(__name__)
SOURCE = "sglang_dsa_plugin"
BACKEND_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
DSA_NAMES = ("dsa", "nsa")
FUSED_OPS = "SGLANG_FORCE_FUSED_OP_BACKEND"


def register() -> None:
    """Queue the step hook, and have what it refuses told in one line."""
    refusals.print_in_one_line()
    register_resolution_hook("handle_model_specific_adjustments")(adjust)


def adjust(server_args: Any, previous: Callable[[Any], None]) -> None:
    """The step for every model: untouched unless the model is DSA or the user asked for dsa."""
    config = hf_config_of(server_args)
    asked = [name for name in BACKEND_FIELDS if getattr(server_args, name, None) in DSA_NAMES]
    if config is None or not is_dsa_config(config):
        if asked:
            architecture = (getattr(config, "architectures", None) or ["this model"])[0]
            raise UnsupportedModel(
                f"--{asked[0].replace('_', '-')} {getattr(server_args, asked[0])}: {architecture} has no index_topk "
                "in its config.json, so it has no sparse attention; choose another attention backend or a DSA "
                "checkpoint"
            )
        previous(server_args)
        return
    settings.table()  # a mistyped switch is refused here, before a model is loaded
    dsa = config_file.read_checked(server_args, config)
    user = _user_values(server_args)
    refuse_flags(user, dsa)
    flags = KernelFlags(
        user.get("dsa_prefill_backend"),
        user.get("dsa_decode_backend"),
        user.get("dsa_topk_backend"),
        user.get("dsa_paged_mqa_logits_backend"),
    )
    device = serving_device(server_args)
    if device == "cpu":
        refuse_on_cpu(user, dsa)
    refuse_plain_rope_of_longcat(dsa)
    refuse_past_the_end(dsa, model_config_of(server_args).context_len)
    serving = _plan(server_args, user, flags, dsa, device)
    _both_phases(server_args)
    declare_resolution(
        server_args,
        SOURCE,
        kv_cache_dtype="bfloat16",
        dsa_prefill_backend=declared(flags.prefill),
        dsa_decode_backend=declared(flags.decode),
    )
    with _capability_shield():
        previous(server_args)
    graphs = _captured_phases(server_args, serving)
    declare_resolution(server_args, SOURCE, kv_cache_dtype=serving.kv_cache_dtype, cuda_graph_config=graphs)
    if model_config_of(server_args).dtype == torch.float32 and torch.cuda.is_available():
        _float32_operators()
    if user.get("chunked_prefill_size") is None and not torch.cuda.is_available():
        declare_resolution(server_args, SOURCE, **_first_chunk_dense(server_args, dsa.index_topk))
    worker_refusals.listen()
    logger.info("sglang-dsa-plugin plan: %s", serving.describe())


def serving_device(server_args: Any) -> str:
    """The device of the arguments, "cuda" or "cpu"; raises plan.Refusal for one that the platform here is not for.

    SGLang's layers take the kernels of the machine's platform, whatever --device says.
    """
    asked = str(resolving_view(server_args).device).partition(":")[0]
    here = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == here:
        return asked
    remedy = (
        'hide the GPUs with CUDA_VISIBLE_DEVICES="" and leave the flag out'
        if asked == "cpu"
        else "leave the flag out, and `sglang-dsa doctor` says what runs on this machine"
    )
    raise plan.Refusal(
        f"--device {asked} is not served for DSA models here: the layers of this machine run on {here}; {remedy}"
    )


def refuse_on_cpu(user: dict[str, Any], config: DsaConfig) -> None:
    """Raise plan.Refusal for what SGLang itself cannot run on a CPU and finds out after loading only."""
    if config.architecture.startswith("LongcatFlash"):
        raise plan.Refusal(
            f"architectures=[{config.architecture!r}] is not served on a CPU: SGLang computes its zero experts with a "
            "Triton kernel, which needs a GPU; serve it on one"
        )
    # Its adapters lie in pinned memory, and its kernels in torch take arguments that its layers do not give.
    for field in ("enable_lora", "lora_paths"):
        if user.get(field):
            raise plan.Refusal(
                f"--{field.replace('_', '-')} is not served for DSA models on a CPU: SGLang's LoRA does not run there; "
                "leave the flag out, or serve a checkpoint into which the adapter was merged"
            )


def refuse_plain_rope_of_longcat(config: DsaConfig) -> None:
    """SGLang's LongCat looks for theta in rope_parameters, which transformers 5 leaves at None. YaRN of factor 1 is the
    same table.
    """
    if config.architecture.startswith("LongcatFlash") and config.yarn is None:
        scaling = {
            "rope_type": "yarn",
            "factor": 1.0,
            "original_max_position_embeddings": config.max_position_embeddings,
        }
        raise UnsupportedModel(
            f"architectures=[{config.architecture!r}] without rope_scaling: SGLang cannot build it, but can with YaRN "
            "of factor 1, which is plain rope; start with --json-model-override-args "
            f"'{json.dumps({'rope_scaling': scaling})}'"
        )


def refuse_past_the_end(config: DsaConfig, context: int) -> None:
    """Raise plan.Refusal for a context of more tokens than scaled rope has positions, before weights are loaded."""
    if config.yarn is not None and context > config.yarn.positions:
        raise plan.Refusal(past_the_end(context, config.yarn.positions))


def _both_phases(server_args: Any) -> None:
    """Declare dsa for each phase. What the user gave for one is dsa by now; that is what he means for the other, which
    SGLang would fill with another backend.
    """
    view = resolving_view(server_args)
    if view.attention_backend not in DSA_NAMES:
        declare_resolution(server_args, SOURCE, attention_backend="dsa")


def _plan(server_args: Any, user: dict[str, Any], flags: KernelFlags, dsa: DsaConfig, device: str) -> plan.ServingPlan:
    """What this server will use; raises plan.Refusal also for an operator that nothing here computes."""
    try:
        return plan.plan_serving(
            model_dtype=model_config_of(server_args).dtype,
            kv_cache_dtype=user.get("kv_cache_dtype") or "auto",
            page_size=user.get("page_size"),
            flags=flags,
            device=device,
            heads=max(1, dsa.num_heads // resolving_view(server_args).tp_size),
            index_heads=dsa.index_n_heads,
            topk=dsa.index_topk,
            dtype=user.get("dtype"),
            max_total_tokens=user.get("max_total_tokens"),
        )
    except support.NotServed as error:
        forced = settings.forced_impl()
        remedy = (
            f"leave SGLANG_DSA_PLUGIN_IMPL={forced} out"
            if forced
            else "`sglang-dsa doctor` says what runs on this machine"
        )
        raise plan.Refusal(f"{dsa.architecture} cannot be served here: {error}; {remedy}") from None


def refuse_flags(user: dict[str, Any], config: DsaConfig) -> None:
    """Raise plan.Refusal for the first flag (as the user gave it) that is not served for a DSA model."""
    for name in BACKEND_FIELDS:
        value = user.get(name)
        if value is not None and value not in DSA_NAMES:
            raise plan.Refusal(
                f"--{name.replace('_', '-')} {value} does not run the sparse attention that {config.architecture} was "
                "trained with; "
                "use --attention-backend dsa, or set SGLANG_DSA_PLUGIN=off to serve it on a GPU the way SGLang does "
                "without this plugin"
            )
    for field, (off, flag) in NOT_SERVED.items():
        value = user.get(field)
        if value not in off:
            shown = "" if value is True else f" {value}"
            raise plan.Refusal(
                f"{flag}{shown} is not served yet for DSA models by sglang-dsa-plugin; leave the flag out, or set "
                "SGLANG_DSA_PLUGIN=off to use SGLang's built-in DSA on a GPU"
            )


def hf_config_of(server_args: Any) -> Any:
    """The model's config, or None for a server without a checkpoint (an instance connector)."""
    from sglang.srt.connector import ConnectorType
    from sglang.srt.utils import parse_connector_type

    if parse_connector_type(resolving_view(server_args).model_path) == ConnectorType.INSTANCE:
        return None
    return model_config_of(server_args).hf_config


def _user_values(server_args: Any) -> dict[str, Any]:
    """Argument values before any step declared something: what the user typed, or SGLang's static default."""
    return server_args._raw_input


def _captured_phases(server_args: Any, serving: plan.ServingPlan) -> Any:
    """SGLang's CUDA graph settings with what of them is served.

    Decode is captured where every operator runs without a look at values on the host. Prefill may use SGLang's
    breakable graphs, whose segments hold everything but the indexer and attention; those of GRAPH_SIZES unless the user
    names others, and of DENSE_GRAPH_SIZES where graphs without breaks may be dense. A float32 model has operators in
    torch that no graph can hold.

    Raises plan.Refusal where the user asks for prefill graphs of another kind.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    config = resolving_view(server_args)
    graphs = config.cuda_graph_config
    if not serving.capturable:
        graphs = with_phase(graphs, Phase.DECODE, backend=Backend.DISABLED)
    given, why_not = server_args._cuda_graph_config_locked, None
    asked = graphs.prefill.backend if (Phase.PREFILL, "backend") in given else None
    if asked not in (None, Backend.BREAKABLE, Backend.DISABLED):
        raise plan.Refusal(
            f"--cuda-graph-backend-prefill {asked} is not served for DSA models by sglang-dsa-plugin: picks are chosen "
            "between the segments of a prefill graph; use breakable or disabled"
        )
    if not torch.cuda.is_available():
        why_not = "there is no CUDA"
    elif config.pp_size > 1:
        why_not = f"they are not served with --pp-size {config.pp_size} yet"
    elif model_config_of(server_args).dtype == torch.float32:
        why_not = "a float32 model runs operators that none can hold"
    if why_not and asked == Backend.BREAKABLE:
        logger.warning("prefill runs outside CUDA graphs: %s", why_not)
    if why_not or graphs.prefill.backend != Backend.BREAKABLE:
        return with_phase(graphs, Phase.PREFILL, backend=Backend.DISABLED)
    if (Phase.PREFILL, "bs") in given:
        return graphs
    most = graphs.prefill.max_bs  # the tokens of a chunk unless it was given; not positive without chunks
    largest = most if most > 0 else dense_fallback.GRAPH_TOKENS
    larger = [tokens for tokens in graphs.prefill.bs if dense_fallback.GRAPH_TOKENS < tokens < largest]
    if (Phase.PREFILL, "max_bs") not in given:
        dense = serving.dense_graphs and settings.whole_prefill()
        larger = list(dense_fallback.DENSE_GRAPH_SIZES) if dense else []
        largest = min(largest, *larger[-1:] or [dense_fallback.GRAPH_TOKENS])
        larger = [tokens for tokens in larger if tokens < largest]
    # SGLang records DeepEP's collectives for multiples of 8 tokens only, and has seen to that before.
    unit = 8 if config.moe_a2a_backend == "deepep" else 1
    largest = max(unit, largest - largest % unit)
    sizes = [tokens for tokens in dense_fallback.GRAPH_SIZES if tokens < largest and tokens % unit == 0]
    return with_phase(graphs, Phase.PREFILL, bs=[*sizes, *larger, largest], max_bs=largest)


def _float32_operators() -> None:
    """SGLang's norms, activations and experts in torch: its GPU kernels for them take 16-bit dtypes only.

    A switch of SGLang, read where an operator first runs; the processes started later inherit it.
    """
    if os.environ.setdefault(FUSED_OPS, "torch") != "torch":
        logger.warning("%s=%s: a float32 model wants torch here", FUSED_OPS, os.environ[FUSED_OPS])


def _first_chunk_dense(server_args: Any, index_topk: int) -> dict[str, int]:
    """On a CPU, prefill chunks of index_topk tokens (whole pages, as SGLang wants them) when its own are longer.

    The first chunk of a prompt is then no longer than index_topk and runs dense, with a third of the arithmetic and no
    scores at all. Chunks below 1024 tokens would cost more in weights read again than they save.
    """
    chunk = resolving_view(server_args).chunked_prefill_size
    if index_topk < 1024 or chunk is None or not index_topk < chunk:
        return {}
    return {"chunked_prefill_size": index_topk // PAGE_SIZE * PAGE_SIZE}


@contextlib.contextmanager
def _capability_shield() -> Iterator[None]:
    """Answer the capability query for the length of the built-in step on a machine without CUDA; the answer is not
    used.
    """
    if torch.cuda.is_available():
        yield
        return
    original = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda *_args, **_kwargs: (0, 0)
    try:
        yield
    finally:
        torch.cuda.get_device_capability = original
