"""Sparse prefill on expanded keys and values: whether it is possible on this server and cheaper for this batch.

Both ways give the same result. Absorbed (ops.sparse_mla) multiplies 576 + 512 values for each picked key and head and
projects every new token twice (q into the latent space, the output out of it). Masked (ops.masked_mha) projects every
cached and new token once a layer, for all heads, and then multiplies 192 + 128 values (V3.2) for each key that a row
sees, picked or not. So masked wins with many rows on contexts of a few k, absorbed with few rows or very long contexts.

It is offered on a CPU only: on a GPU a gather of picked rows is cheap and products of many rows are not the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dsa_plugin.cache.layouts import LATENT_DIM, ROPE_DIM, ROW_DIM

# Expanded keys and values of one layer alive at once; past this a batch runs absorbed.
MAX_BYTES = 1 << 30
# Cost of a multiplication and addition in each place, measured (EPYC Zen 4, 2 cores, 16 heads, bf16 model), in units of
# one in a large float32 product: projecting (half of it in bf16), absorbed over a union of picks, masked with its mask.
_PROJECT, _ABSORBED, _MASKED = 0.7, 1.2, 1.7
# Keys that absorbed attention works through for one row, at most, in units of k: the union of neighbouring rows' picks.
_UNION = 3


@dataclass(frozen=True)
class MaskedPrefill:
    """heads: of one rank.  nope, value: widths of a head's key without rope and of its value.  topk: picks of a row.
    itemsize: bytes of a value in the model's dtype.  ruled_out: why this server never runs it, or None.
    always: whenever it is possible, whatever it costs.
    """

    heads: int
    nope: int
    value: int
    topk: int
    itemsize: int
    ruled_out: str | None = None
    always: bool = False

    def describe(self) -> str:
        """What sparse prefill runs on this server, for the log."""
        if self.ruled_out is not None:
            return f"sparse ({self.ruled_out})"
        return "masked wherever it fits" if self.always else "masked or sparse by cost"

    def judge(self, prefix: Sequence[int], extend: Sequence[int]) -> tuple[bool, str]:
        """Whether a batch of `extend[b]` new tokens after `prefix[b]` cached ones runs masked, and why (not)."""
        if self.ruled_out is not None:
            return False, self.ruled_out
        keys = sum(prefix) + sum(extend)
        need = keys * self.bytes_per_key()
        if need > MAX_BYTES:
            return False, f"{need >> 20} MiB of expanded keys and values > {MAX_BYTES >> 20} MiB"
        masked, absorbed = self.costs(prefix, extend)
        what = f"masked costs {masked / max(absorbed, 1):.2f} of absorbed"
        return self.always or masked < absorbed, what

    def bytes_per_key(self) -> int:
        """Bytes alive for a token while it is expanded: its projection, which holds the values, and key of every head,
        its cached row.
        """
        return self.itemsize * (self.heads * (2 * self.nope + ROPE_DIM + self.value) + ROW_DIM)

    def costs(self, prefix: Sequence[int], extend: Sequence[int]) -> tuple[float, float]:
        """(masked, absorbed) in multiplications of a large product."""
        rows, keys = sum(extend), sum(prefix) + sum(extend)
        # Tokens a row of each request sees on average.
        seen = [p + (e + 1) / 2 for p, e in zip(prefix, extend)]
        every = sum(e * s for e, s in zip(extend, seen))
        united = sum(e * min(s, _UNION * self.topk) for e, s in zip(extend, seen))
        project = _PROJECT * LATENT_DIM * (self.nope + self.value)
        masked = keys * project + every * _MASKED * (self.nope + ROPE_DIM + self.value)
        absorbed = rows * project + united * _ABSORBED * (ROW_DIM + LATENT_DIM)
        return self.heads * masked, self.heads * absorbed
