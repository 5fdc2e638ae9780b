"""SGLang flags whose features are not served for a DSA model, and the values that leave them off."""

from __future__ import annotations

from typing import Any

# Features that need work of their own in this package. Field -> (value that means "off", flag as the user types it).
NOT_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "speculative_algorithm": ((None,), "--speculative-algorithm"),
    "enable_prefill_cp": ((False, None), "--enable-prefill-cp"),
    "attn_cp_size": ((1, None), "--attn-cp-size"),
    "enable_cp_decode_attn_tp": ((False, None), "--enable-cp-decode-attn-tp"),
    "enable_dp_attention": ((False, None), "--enable-dp-attention"),
    "attn_dp_size": ((1, None), "--attn-dp-size"),
    "dcp_size": ((1, None), "--dcp-size"),
    "enable_hisparse": ((False, None), "--enable-hisparse"),
    "enable_hierarchical_cache": ((False, None), "--enable-hierarchical-cache"),
    "enable_lmcache": ((False, None), "--enable-lmcache"),
    "enable_flexkv": ((False, None), "--enable-flexkv"),
    "enable_unified_cache_external_linker": ((False, None), "--enable-unified-cache-external-linker"),
    "enable_page_major_kv_layout": ((False, None), "--enable-page-major-kv-layout"),
    "enable_dsa_cache_layer_split": ((False, None), "--enable-dsa-cache-layer-split"),
    "enable_kv_cache_sharding": ((False, None), "--enable-kv-cache-sharding"),
    "enable_two_batch_overlap": ((False, None), "--enable-two-batch-overlap"),
    "enable_unified_memory": ((False, None), "--enable-unified-memory"),
    "enable_pdmux": ((False, None), "--enable-pdmux"),
    "disaggregation_mode": (("null", None), "--disaggregation-mode"),
    "dsa_triton_union": ((0, None), "--dsa-triton-union"),
    "enable_dsa_fused_indexer": ((False, None), "--enable-dsa-fused-indexer"),
}


def served_values() -> dict[str, str]:
    """Flag -> what may be given, in words."""
    words: dict[str, str] = {}
    for off, flag in NOT_SERVED.values():
        given = [str(value) for value in off if value not in (None, False, 0)]
        words[flag] = f"{', '.join(given)}, or left out" if given else "left out"
    return words
