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
    """An implementation that a flag asks for. flag: as the user typed it, with its value. parts: what each of two flags
    asks for alone, where the implementation follows from both.
    """

    implementation: str
    flag: str
    parts: tuple[Forced, ...] = ()


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

    def refuse_unserved(self, device: str) -> None:
        """Raise Refusal for a value that is not served, not for its phase or not on this device (a torch device type):
        what can be said of each flag alone.
        """
        for _, flag, value in self._attention():
            _served_attention(flag, value, device)
        self.forced_index(device)

    def forced(self, layout: str, device: str) -> dict[str, Forced]:
        """What the flags force, by use: sparse_mla (decode), sparse_mla_prefill, and those of `forced_index`. layout:
        of the pool's rows; device: torch device type.

        Raises Refusal as `refuse_unserved` does, and for a kernel that does not read these rows.
        """
        device = device.split(":")[0]
        self.refuse_unserved(device)
        found = self.forced_index(device)
        for use, flag, value in self._attention():
            found[use] = Forced(_reader_of(flag, value, layout), f"{flag} {value}")
        return found

    def forced_index(self, device: str) -> dict[str, Forced]:
        """What the flags force of the indexer: index_select_paged (decode) and index_select_prefill. Raises Refusal for
        a value that is not served or not on this device.
        """
        found: dict[str, Forced] = {}
        selection = _one_of(TOPK, self.topk, SELECTION, {}, device)
        scores = _one_of(LOGITS, self.logits, SCORES, _SCORES_NOT_SERVED, device)
        parts = [Forced(scores, f"{LOGITS} {self.logits}")] if scores else []
        if selection:
            parts.append(Forced(selection, f"{TOPK} {self.topk}"))
            found["index_select_prefill"] = parts[-1]
        if len(parts) == 1:
            found["index_select_paged"] = parts[0]
        elif parts:
            both = "_".join(part.implementation for part in parts), " ".join(part.flag for part in parts)
            found["index_select_paged"] = Forced(*both, tuple(parts))
        return found

    def fp8_layout(self) -> str | None:
        """The layout of an fp8 pool's rows that both phases read; None where any will do, as for a flag left out.

        Raises Refusal for two kernels without one in common. A kernel that reads no fp8 rows at all has no say: it is
        refused for its own reason by `forced`.
        """
        wanted = {f"{flag} {value}": _fp8_rows(value) for _, flag, value in self._attention() if _fp8_rows(value)}
        if not wanted:
            return None
        shared = set.intersection(*wanted.values())
        if not shared:
            rows = " and ".join("/".join(sorted(read)) for read in wanted.values())
            raise Refusal(
                f"{' and '.join(wanted)} read different fp8 rows ({rows}) and cannot share a pool; leave one of the "
                "flags out or give it triton, which reads either"
            )
        return shared.pop() if len(shared) == 1 else None

    def _attention(self) -> list[tuple[str, str, str]]:
        """(use, flag, value) of the attention flags that were given."""
        both = (("sparse_mla_prefill", PREFILL, self.prefill), ("sparse_mla", DECODE, self.decode))
        return [(use, flag, value) for use, flag, value in both if value is not None]


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


def _fp8_rows(value: str) -> set[str]:
    return {layout for layout in ATTENTION.get(value, {}) if layout.startswith("fp8")}


def _values_of(flag: str) -> list[str]:
    return [value for value in ATTENTION if flag == PREFILL or value not in PREFILL_ONLY]


def _served_attention(flag: str, value: str, device: str) -> None:
    if value in _NOT_SERVED:
        raise Refusal(f"{flag} {value} {_NOT_SERVED[value]}, or leave the flag out")
    known = ", ".join(_values_of(flag))
    if value in PREFILL_ONLY and flag == DECODE:
        raise Refusal(
            f"{flag} {value} chooses among kernels for prefill only; use one of {known}, or leave the flag out"
        )
    if value not in ATTENTION:
        raise Refusal(f"{flag} {value} is not known here; use one of {known}, or leave the flag out")
    _needs_gpu(flag, value, device)


def _reader_of(flag: str, value: str, layout: str) -> str:
    if layout in ATTENTION[value]:
        return ATTENTION[value][layout]
    others = [v for v in _values_of(flag) if layout in ATTENTION[v]]
    fitting = f"use one of {', '.join(others)}, " if others else ""
    # Rows follow the flags, so that other fp8 rows than the kernel's are there by the setting only.
    by_setting = layout.startswith("fp8") and _fp8_rows(value)
    rows = "unset SGLANG_DSA_PLUGIN_LATENT_LAYOUT" if by_setting else "give another --kv-cache-dtype"
    raise Refusal(
        f"{flag} {value} reads {' or '.join(ATTENTION[value])} rows, and the pool holds {layout}; {fitting}{rows}, or "
        "leave the flag out"
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
