"""Stand-ins for classes of SGLang whose features are not served: building one is an error that says what to leave out.

The argument check and the config reader refuse both before; these hold where another way leads there.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dsa_plugin.config import UnsupportedModel
from sglang_dsa_plugin.kernel_flags import Refusal


class DsaMultiStepBackend:
    """In place of SGLang's multi-step backend of draft models."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise Refusal("speculative decoding is not served yet for DSA models; remove the --speculative-* flags")


class PooledIndexerRefusal(torch.nn.Module):
    """In place of `IndexerKPool`."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise UnsupportedModel(
            "index_kpool > 1: picking pooled keys is not served yet; set SGLANG_DSA_PLUGIN=off on a GPU"
        )
