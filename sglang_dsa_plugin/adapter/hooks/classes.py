"""Class replacement: backend, multi-step backend and indexers.

Why: SGLang builds these classes by name in many places (registry factory, `nsa` alias, draft workers, isinstance
gates); its class replacement is the one seam that reaches all of them, also in modules already imported.
Upstream: layers/attention/dsa_backend.py, layers/attention/dsa/dsa_indexer.py, dsa_indexer_kpool.py.
Can go: when SGLang takes the backend and the indexer of a DSA model from a registry on every device.
"""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_ATTENTION = "sglang.srt.layers.attention"


def register() -> None:
    """Queue the replacements; SGLang applies them after all plugins have registered."""
    from sglang_dsa_plugin.adapter import selfcheck

    for target, replacement in selfcheck.replacements().items():
        HookRegistry.register(f"{_ATTENTION}.{target}", replacement, HookType.REPLACE)
