"""Facts of this process that several adapters need: the model's dtype, the plan and the kernel flags in force.

SGLang builds pool, indexers and backend from different places with different arguments; each reads these answers,
which come from SGLang's published configuration and the plugin's settings and are therefore the same in every process
of a server.
"""

from __future__ import annotations

import torch

from sglang_dsa_plugin import plan
from sglang_dsa_plugin.kernel_flags import KernelFlags

_model_dtype: torch.dtype | None = None


def set_model_dtype(dtype: torch.dtype) -> None:
    """Note the dtype the model computes in; a second, different one is refused (one process serves one model)."""
    global _model_dtype
    if _model_dtype is not None and _model_dtype != dtype:
        raise RuntimeError(f"the process already serves a model in {_model_dtype}, now asked for {dtype}")
    _model_dtype = dtype


def model_dtype() -> torch.dtype:
    """The dtype the model computes in, noted when its first indexer was built."""
    if _model_dtype is None:
        raise RuntimeError(
            "the model's dtype is not known yet: no indexer of this package has been built in this process"
        )
    return _model_dtype


def serving() -> bool:
    """Whether a model with indexers of this package has been built in this process."""
    return _model_dtype is not None


def index_key_dtype() -> torch.dtype:
    """Dtype of index keys for the model being served."""
    return plan.index_key_dtype(model_dtype())


def kernel_flags() -> KernelFlags:
    """The kernel flags of the user, from the arguments that SGLang publishes in every process."""
    from sglang.srt.runtime_context import get_exec

    kernel = get_exec().kernel
    return KernelFlags.published(
        kernel.dsa_prefill_backend,
        kernel.dsa_decode_backend,
        kernel.dsa_topk_backend,
        kernel.dsa_paged_mqa_logits_backend,
    )
