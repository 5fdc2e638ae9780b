"""SGLang's own flags that name kernels: what each value means here, or why it is refused.

    --dsa-prefill-backend, --dsa-decode-backend      sparse attention of a phase
    --dsa-topk-backend                               selection, in both phases
    --dsa-paged-mqa-logits-backend                   index scores of decode

A value is mapped to an implementation of the support table, which is then forced for what the flag is about; where that
cannot run, the server does not start. Two values are SGLang's defaults and cannot be told from a user's choice, since
SGLang keeps values and not who gave them: `sgl-kernel` and `auto`. They leave the choice to the table;
SGLANG_DSA_PLUGIN_IMPL reaches the same kernels (`sgl_kernel`, `deep_gemm`).

The flags reach the worker processes through SGLang's published arguments. There the attention flags carry this
package's name, so that no layout rule that SGLang keys by a kernel's name applies, and the user's value behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

# What SGLang's dsa_*_backend is set to; a value of the user follows after a colon.
DECLARED = "sglang_dsa_plugin"
PREFILL, DECODE = "--dsa-prefill-backend", "--dsa-decode-backend"
TOPK, LOGITS = "--dsa-topk-backend", "--dsa-paged-mqa-logits-backend"
# Its fp8 rows are raw, 576 bytes; every other fp8 kernel here reads packed rows of 656 (this package's read both).
RAW_FP8 = ("trtllm",)

_OURS = {"bf16_1152": "triton", "fp8_656": "triton", "fp8_576": "triton"}
# Value -> row layout -> implementation of sparse_mla.
ATTENTION: dict[str, dict[str, str]] = {
    "flashmla_sparse": {"bf16_1152": "flash_mla"},
    "flashmla_kv": {"fp8_656": "flash_mla_kv"},
    "flashmla_auto": {"bf16_1152": "flash_mla", "fp8_656": "flash_mla_kv"},
    "fa3": {"bf16_1152": "fa3"},
    "trtllm": {"bf16_1152": "trtllm", "fp8_576": "trtllm_fp8"},
    "triton": _OURS,
    "triton_sparse_mla": _OURS,
}
PREFILL_ONLY = ("flashmla_auto", "triton_sparse_mla")
_NOT_SERVED = {
    "flashmla_sparse_q8": "rounds queries and rows to fp8 and is not served; use flashmla_sparse",
    "flashinfer_sparse_mla": "is not served; use triton, which reads the same rows",
    "tilelang": "is part of SGLang's own attention and not served; use triton",
    "aiter": "is for AMD GPUs, where this package stands aside",
    "intel_xpu": "is for Intel GPUs, where this package stands aside",
}
# Value -> implementation of the selection; None leaves it to the table.
SELECTION: dict[str, str | None] = {"sgl-kernel": None, "torch": "torch_topk", "flashinfer": "flashinfer"}
# Value -> implementation of decode's index scores.
SCORES: dict[str, str | None] = {"auto": None, "deepgemm": "deep_gemm"}
_SCORES_NOT_SERVED = {
    "cutedsl": "is part of SGLang's own indexer and not served; use deepgemm",
    "aiter": _NOT_SERVED["aiter"],
}


class Refusal(ValueError):
    """A combination that is not served. The message names the flag or key and the remedy."""


@dataclass(frozen=True)
class Forced:
    """An implementation that a flag asks for. flag: as the user typed it, with its value."""

    implementation: str
    flag: str


@dataclass(frozen=True)
class KernelFlags:
    """The four values as the user gave them; None and SGLang's defaults leave the choice to the support table."""

    prefill: str | None = None
    decode: str | None = None
    topk: str | None = None
    logits: str | None = None

    @classmethod
    def published(cls, prefill: str | None, decode: str | None, topk: str | None, logits: str | None) -> KernelFlags:
        """From SGLang's arguments in a worker process, where the first two are as `declared` made them."""
        return cls(_given(prefill), _given(decode), topk, logits)

    def forced(self, layout: str, device: str) -> dict[str, Forced]:
        """What the flags force, by use: sparse_mla (decode), sparse_mla_prefill, and those of `forced_index`. layout:
        of the pool's rows; device: torch device type.

        Raises Refusal for a value that is not served, not for its phase, not on this device or not for these rows.
        """
        device = device.split(":")[0]
        found = self.forced_index(device)
        for use, flag, value in (("sparse_mla_prefill", PREFILL, self.prefill), ("sparse_mla", DECODE, self.decode)):
            if value is not None:
                found[use] = Forced(_attention(flag, value, layout, device), f"{flag} {value}")
        return found

    def forced_index(self, device: str) -> dict[str, Forced]:
        """What the flags force of the indexer: index_select_paged (decode) and index_select_prefill. Raises Refusal for
        a value that is not served or not on this device.
        """
        found: dict[str, Forced] = {}
        selection = _one_of(TOPK, self.topk, SELECTION, {}, device)
        scores = _one_of(LOGITS, self.logits, SCORES, _SCORES_NOT_SERVED, device)
        given = [f"{TOPK} {self.topk}"] if selection else []
        if selection:
            found["index_select_prefill"] = Forced(selection, given[0])
        if selection or scores:
            name = "_".join(part for part in (scores, selection) if part)
            given += [f"{LOGITS} {self.logits}"] if scores else []
            found["index_select_paged"] = Forced(name, " ".join(given))
        return found

    def refuse_mixed_rows(self) -> None:
        """Raise Refusal where the two phases would want different fp8 rows in the one pool."""
        raw = {value in RAW_FP8 for value in (self.prefill, self.decode)}
        if raw == {True, False}:
            raise Refusal(
                f"{PREFILL} {self.prefill or '(left out)'} and {DECODE} {self.decode or '(left out)'} read different "
                "fp8 rows (576 raw against 656 packed bytes) and cannot share a pool; name "
                f"{' or '.join(RAW_FP8)} for both or for neither"
            )

    @property
    def raw_rows(self) -> bool:
        """Whether fp8 rows are to be raw."""
        return self.prefill in RAW_FP8 and self.decode in RAW_FP8


def declared(value: str | None) -> str:
    """What SGLang's dsa_prefill_backend or dsa_decode_backend is set to for a value of the user."""
    return DECLARED if value is None else f"{DECLARED}:{value}"


def served_values() -> dict[str, str]:
    """Flag -> what its values do, in words."""

    def attention(values: list[str]) -> str:
        return ", ".join(f"{value} ({'/'.join(dict.fromkeys(ATTENTION[value].values()))})" for value in values)

    decode = [value for value in ATTENTION if value not in PREFILL_ONLY]
    return {
        PREFILL: f"{attention(list(ATTENTION))}; or left out",
        DECODE: f"{attention(decode)}; or left out",
        TOPK: "sgl-kernel, as left out; torch and flashinfer, which are not exact",
        LOGITS: "auto, as left out; deepgemm (decode)",
    }


def _given(value: str | None) -> str | None:
    return (value or "").removeprefix(DECLARED).removeprefix(":") or None


def _attention(flag: str, value: str, layout: str, device: str) -> str:
    if value in _NOT_SERVED:
        raise Refusal(f"{flag} {value} {_NOT_SERVED[value]}, or leave the flag out")
    phase = [v for v in ATTENTION if flag == PREFILL or v not in PREFILL_ONLY]
    if value in PREFILL_ONLY and flag == DECODE:
        raise Refusal(
            f"{flag} {value} chooses among kernels for prefill only; use one of {', '.join(phase)}, or leave the flag "
            "out"
        )
    if value not in ATTENTION:
        raise Refusal(f"{flag} {value} is not known here; use one of {', '.join(phase)}, or leave the flag out")
    _needs_gpu(flag, value, device)
    if layout in ATTENTION[value]:
        return ATTENTION[value][layout]
    others = [v for v in phase if layout in ATTENTION[v]]
    fitting = f"use one of {', '.join(others)}, " if others else ""
    raise Refusal(
        f"{flag} {value} reads {' or '.join(ATTENTION[value])} rows, and the pool holds {layout}; {fitting}"
        f"give another --kv-cache-dtype, or leave the flag out"
    )


def _one_of(
    flag: str, value: str | None, known: dict[str, str | None], refused: dict[str, str], device: str
) -> str | None:
    if value is None:
        return None
    if value in refused:
        raise Refusal(f"{flag} {value} {refused[value]}, or leave the flag out")
    if value not in known:
        raise Refusal(f"{flag} {value} is not known here; use one of {', '.join(known)}, or leave the flag out")
    if known[value] is None or (value == "torch" and device != "cuda"):
        # Off CUDA the table's own selection is torch, and exact.
        return None
    _needs_gpu(flag, value, device)
    return known[value]


def _needs_gpu(flag: str, value: str, device: str) -> None:
    if device != "cuda":
        raise Refusal(
            f"{flag} {value} names a GPU kernel, and this server runs on a {device.upper()}; leave the flag out"
        )
