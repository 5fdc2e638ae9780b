"""What a server of one DSA model will use, decided once from the flags, the model and the device.

`plan_serving` is pure: flags and facts in, a `ServingPlan` with one reason per choice out, or a `Refusal` that names
the flag and the remedy. The argument hook declares what it says, the pool allocates it, the backend logs it and the
doctor prints it, so no two of them can disagree about a layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from sglang_dsa_plugin import settings, support
from sglang_dsa_plugin.cache.layouts import FP8, LATENT_LAYOUTS, PAGE_SIZE, LatentLayout, index_token_bytes
from sglang_dsa_plugin.kernel_flags import Forced, KernelFlags, Refusal
from sglang_dsa_plugin.support_row import MANY_ROWS

KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3")
# Operators of a decode step whose implementations differ in what a CUDA graph can record.
DECODE_OPERATORS = ("index_select_paged", "positions_to_slots", "sparse_mla")
# What a flag can force by phase, and the operator that it is about.
USES = {
    "sparse_mla": "sparse_mla",
    "sparse_mla_prefill": "sparse_mla",
    "index_select_paged": "index_select_paged",
    "index_select_prefill": "index_select_paged",
}
INDEX_PREFILL = "index_select_prefill"
NO_FLAGS = KernelFlags()
# A pool of one page admits no request, not even SGLang's own at start; with two each ends before its first token.
LEAST_TOKENS = 3 * PAGE_SIZE


@dataclass(frozen=True)
class ServingPlan:
    """The choices for one server, with a reason for each.

    kv_cache_dtype: what SGLang's kv_cache_dtype is set to ("auto" keeps the model's dtype: float32).
    latent: layout of a latent row.  index_key_dtype: dtype of an index key (fp8 e4m3 or the model's).
    implementations: operator -> implementation by name.  reasons: choice -> words.  capturable: whether a decode step
    may be recorded in a CUDA graph: none of its operators looks at values on the host. dense_graphs: whether a prefill
    that runs dense may.
    """

    kv_cache_dtype: str
    latent: LatentLayout
    index_key_dtype: torch.dtype
    implementations: dict[str, str]
    reasons: dict[str, str] = field(default_factory=dict)
    capturable: bool = False
    dense_graphs: bool = False

    def describe(self) -> str:
        """One line for the log: every choice with its reason."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())


def latent_layout(kv_dtype: torch.dtype, flags: KernelFlags = NO_FLAGS) -> LatentLayout:
    """The row layout of a pool of `kv_dtype` (bfloat16, float32 or e4m3).

    For fp8 the setting SGLANG_DSA_PLUGIN_LATENT_LAYOUT decides; on auto, SGLang's own kernel flags do: the rows that
    their kernels read, 656 bytes where either kind will do. Raises Refusal for other dtypes and for a pair that cannot
    share rows.
    """
    if kv_dtype == torch.bfloat16:
        return LATENT_LAYOUTS["bf16_1152"]
    if kv_dtype == torch.float32:
        return LATENT_LAYOUTS["fp32_2304"]
    if kv_dtype != FP8:
        raise Refusal(
            f"KV cache dtype {str(kv_dtype).removeprefix('torch.')} is not served for a DSA model; "
            f"use --kv-cache-dtype with one of {', '.join(KV_CACHE_DTYPES)}, and --dtype bfloat16 or float32"
        )
    by_flags = flags.fp8_layout() or "fp8_656"
    forced = settings.latent_layout()
    return LATENT_LAYOUTS[by_flags if forced == "auto" else forced]


def index_key_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of index keys: SGLANG_DSA_PLUGIN_INDEX_KEYS, where auto is the model's dtype for float32 models, else
    fp8.
    """
    choice = settings.index_keys()
    if choice == "fp8" or (choice == "auto" and model_dtype != torch.float32):
        return FP8
    return model_dtype


def plan_serving(
    *,
    model_dtype: torch.dtype,
    kv_cache_dtype: str = "auto",
    page_size: int | None = None,
    flags: KernelFlags = NO_FLAGS,
    device: str = "cpu",
    sm: int | None = None,
    heads: int | None = None,
    index_heads: int | None = None,
    topk: int | None = None,
    dtype: str | None = None,
    max_total_tokens: int | None = None,
) -> ServingPlan:
    """Decide for one server.

    model_dtype: dtype the model computes in (float32 or bfloat16).  kv_cache_dtype, page_size, flags: SGLang's flags as
    the user gave them, None when unset.  device: torch device type.  sm: compute capability x 10 on CUDA.  heads:
    attention heads of one rank.  index_heads, topk: of the indexer.  dtype, max_total_tokens: SGLang's flags, too; with
    dtype "auto" a refusal says who chose model_dtype. Raises Refusal naming the flag and the remedy.
    """
    if model_dtype not in (torch.bfloat16, torch.float32):
        made = _name(model_dtype)
        asked = f"auto ({made} for this checkpoint, by SGLang)" if dtype == "auto" else made
        raise Refusal(
            f"--dtype {asked} is not served for a DSA model: cached rows are "
            "bfloat16, float32 or "
            "fp8, and index scores overflow in float16; use --dtype bfloat16 (or float32)"
        )
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise Refusal(
            f"--kv-cache-dtype {kv_cache_dtype} is not served for a DSA model; use one of {', '.join(KV_CACHE_DTYPES)}"
        )
    if page_size not in (None, PAGE_SIZE):
        raise Refusal(
            f"--page-size {page_size} cannot be served for a DSA model: an index page holds {PAGE_SIZE} keys followed "
            "by their "
            f"scales; leave --page-size out or set it to {PAGE_SIZE}"
        )
    if max_total_tokens is not None and max_total_tokens < LEAST_TOKENS:
        raise Refusal(
            f"--max-total-tokens {max_total_tokens} is less than any request needs: a prompt takes a page of "
            f"{PAGE_SIZE}, its answer another, and SGLang keeps a third free; give at least {LEAST_TOKENS}"
        )
    flags.refuse_unserved(device)
    kv_dtype, resolved = _kv_dtype(kv_cache_dtype, model_dtype)
    latent = latent_layout(kv_dtype, flags)
    keys = index_key_dtype(model_dtype)
    choices = operator_choices(
        device, latent.name, sm, model_dtype, heads, index_heads=index_heads, topk=topk, flags=flags
    )
    host_reader = next((row for op in DECODE_OPERATORS for row in _ever_taken(choices[op]) if not row.capturable), None)
    asked = f"--kv-cache-dtype {kv_cache_dtype}"
    reasons = {
        "KV layout": f"{latent.name}, {latent.row_bytes} B a token and layer ({asked}, model in {_name(model_dtype)})",
        "index keys": f"{_name(keys)}, {index_token_bytes(keys)} B a token and indexing layer "
        f"(SGLANG_DSA_PLUGIN_INDEX_KEYS={settings.index_keys()})",
        "rotation": "on queries and keys, since keys are fp8"
        if keys == FP8
        else "off on both sides, since keys are not fp8",
        "decode CUDA graph": "off, no CUDA device"
        if device != "cuda"
        else "captured"
        if host_reader is None
        else f"off, {host_reader.operator}={host_reader.name} reads values on the host",
    } | {op: f"{choice.words} ({choice.reason})" for op, choice in choices.items()}
    return ServingPlan(
        resolved,
        latent,
        keys,
        {op: c.name for op, c in choices.items()},
        reasons,
        capturable=device == "cuda" and host_reader is None,
        dense_graphs=dense_graphs(device, choices),
    )


def picks_are_whole(choices: dict[str, support.Choice]) -> bool:
    """Whether every selection among `choices` is one that leaves all min(length, k) picks of a row, and first: ours and
    torch's do; the top-k of another package promises nothing, and what it returns beside positions is taken out.
    """
    names = {name for part in ("index_select_paged", INDEX_PREFILL) if part in choices for name in choices[part].names}
    rows = (row for row in support.rows("index_select_paged") if row.name in names)
    return all(dict(row.arguments).get("selection", "triton") in ("triton", "torch_topk") for row in rows)


def operator_choices(
    device: str,
    layout: str,
    sm: int | None = None,
    dtype: torch.dtype | None = None,
    heads: int | None = None,
    packages: str = "installed",
    index_heads: int | None = None,
    topk: int | None = None,
    flags: KernelFlags = NO_FLAGS,
) -> dict[str, support.Choice]:
    """The implementation of each operator on the serving path: by SGLang's flags, SGLANG_DSA_PLUGIN_IMPL, or the
    support table.

    "sparse_mla" and "index_select_paged" are decode's, "sparse_mla_prefill" is that of calls with many rows, and
    "index_select_prefill" is there where it is another one. Where a choice depends on the number of rows, its `steps`
    say how; for sparse attention once, if no flag parts the phases. dtype: of the model; heads: of a rank; index_heads,
    topk: of the indexer. Raises Refusal for a flag whose kernel cannot run here.
    """
    forced = flags.forced(layout, device)

    def ask(use: str, impl: str | None, rows: int) -> support.Choice:
        operator = USES.get(use, use)
        attends = operator in ("sparse_mla", "dense_mha")
        scores = operator == "index_select_paged"
        return support.choose(
            operator,
            device=device,
            impl=impl,
            sm=sm,
            layout=layout,
            heads=heads if attends else index_heads if scores else None,
            k=topk if operator in ("sparse_mla", "index_select_paged") else None,
            dtype=dtype if attends else index_key_dtype(dtype) if scores and dtype is not None else None,
            rows=rows,
            packages=packages,
            # A decode step makes what its layers need for picks once.
            planned=use == "index_select_paged",
        )

    def choose(use: str, rows: int) -> support.Choice:
        if use not in forced:
            return ask(use, implementation_for(use, forced), rows)
        # Of two flags the one that is at fault is named.
        for asked in (*forced[use].parts, forced[use]):
            try:
                choice = ask(use, asked.implementation, rows)
            except support.NotServed as error:
                raise Refusal(f"{asked.flag} cannot be served here: {error}; leave the flag out") from None
        return replace(choice, reason=f"by {forced[use].flag}")

    def with_steps(use: str, rows: int) -> support.Choice:
        unit = "rows a request" if use == INDEX_PREFILL else "rows"
        return replace(choose(use, rows), steps=support.by_rows(lambda step: choose(use, step)), unit=unit)

    many = MANY_ROWS
    by_step = {op: with_steps(op, 1) for op in ("index_select_paged", "sparse_mla")}
    decode = {op: choose(op, 1) for op in DECODE_OPERATORS} | by_step
    prefill = choose if forced.keys().isdisjoint(("sparse_mla", "sparse_mla_prefill")) else with_steps
    picks = with_steps(INDEX_PREFILL, many)
    return decode | {
        "sparse_mla_prefill": prefill("sparse_mla_prefill", many),
        "dense_mha": choose("dense_mha", many),
        **({INDEX_PREFILL: picks} if picks.words != decode["index_select_paged"].words else {}),
        **({"masked_mha": choose("masked_mha", many)} if device == "cpu" else {}),
    }


def _ever_taken(choice: support.Choice) -> tuple[support.Implementation, ...]:
    """All that a choice may come to, whatever the number of rows."""
    return tuple(row for _, row in choice.steps) or (choice.implementation,)


def implementation_for(use: str, forced: dict[str, Forced]) -> str | None:
    """The implementation a server hands to an operator: what a flag forces for this use, else SGLANG_DSA_PLUGIN_IMPL,
    else None. forced: of `KernelFlags.forced`.
    """
    return forced[use].implementation if use in forced else forced_impl(USES.get(use, use))


def why_not_dense(device: str, choices: dict[str, support.Choice]) -> str | None:
    """Why prefill of short requests should not run dense on this device, or None; choices: of `operator_choices`.

    On a GPU the dense operator in torch is far slower than a sparse kernel, for the same result.
    """
    if device.startswith("cuda") and choices["dense_mha"].name == "torch" != choices["sparse_mla_prefill"].name:
        return f"no dense kernel here ({choices['dense_mha'].reason})"
    return None


def dense_graphs(device: str, choices: dict[str, support.Choice]) -> bool:
    """Whether a CUDA graph may hold a prefill that runs dense; choices: of `operator_choices`."""
    return device.startswith("cuda") and why_not_dense(device, choices) is None and _recordable(choices["dense_mha"])


def _recordable(choice: support.Choice) -> bool:
    return all(row.capturable for row in _ever_taken(choice))


def forced_impl(operator: str) -> str | None:
    """The implementation SGLANG_DSA_PLUGIN_IMPL forces on an operator; None where the operator has none of that name.

    Raises Refusal for a name that no operator has: a mistyped switch must not quietly serve something else.
    """
    name = settings.forced_impl()
    if name is None or any(row.name == name for row in support.rows(operator)):
        return name
    known = sorted({row.name for row in support.rows()})
    if name not in known:
        raise Refusal(
            f"SGLANG_DSA_PLUGIN_IMPL={name!r}: no operator has an implementation of that name; use {', '.join(known)}"
        )
    return None


def _kv_dtype(flag: str, model_dtype: torch.dtype) -> tuple[torch.dtype, str]:
    """Torch dtype of the pool and the value to declare; auto follows the model's dtype."""
    if flag == "fp8_e4m3":
        return FP8, flag
    if flag == "auto" and model_dtype == torch.float32:
        return torch.float32, "auto"
    return torch.bfloat16, "bfloat16"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
