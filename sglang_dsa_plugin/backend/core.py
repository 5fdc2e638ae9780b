"""Attention of one layer over cached rows, independent of the server: sparse on the picks, or on expanded keys and
values, dense or masked by the picks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_dsa_plugin.backend.metadata import StepMetadata
from sglang_dsa_plugin.cache.layouts import LATENT_DIM, LatentLayout
from sglang_dsa_plugin.ops import dense_mha, masked_mha, sparse_mla


@dataclass(frozen=True)
class AttentionCore:
    """layout: of the cached rows.  impl_sparse (decode), impl_prefill (sparse prefill), impl_slots, impl_dense,
    impl_masked: implementation names, None to let the support table choose.  whole_picks: whether whoever picks is sure
    to leave min(length, k) positions first and -1 behind; other packages are only believed to.
    """

    layout: LatentLayout
    impl_sparse: str | None = None
    impl_prefill: str | None = None
    impl_slots: str | None = None
    impl_dense: str | None = None
    impl_masked: str | None = None
    whole_picks: bool = True

    def sparse(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        rows: torch.Tensor,
        picks: torch.Tensor,
        step: StepMetadata,
        scale: float,
        sink: torch.Tensor | None = None,
        prefill: bool = False,
    ) -> torch.Tensor:
        """Absorbed attention over the picked rows.

        q_latent [R,H,512], q_rope [R,H,64], rows [N,width] of the layer, picks [R,k] positions in each row's request,
        -1 none. prefill: whether the rows are of a prefill, which may have an implementation of its own. Returns
        [R, H*512] in q's dtype; zero for rows without picks. Raises ValueError when picks do not match the rows.
        """
        if picks.shape[0] != step.rows:
            raise ValueError(
                f"sparse attention: picks must have {step.rows} rows like the step, got {list(picks.shape)}"
            )
        # A kernel stops at a short row's last pick; on a CPU the columns past it are already gone.
        counts = step.pick_counts(picks.shape[1]) if q_latent.is_cuda else None
        out, _ = sparse_mla.sparse_mla(
            q_latent,
            rows,
            step.slots_of(picks, self.impl_slots),
            scale,
            self.layout.name,
            sink=sink,
            lengths=counts,
            impl=self.impl_prefill if prefill else self.impl_sparse,
            q_rope=q_rope,
            # What the page table names is cached.
            prefix=self.whole_picks and counts is not None,
            with_lse=False,
        )
        return out.reshape(out.shape[0], -1, LATENT_DIM).flatten(1)

    def expanded(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepMetadata, scale: float
    ) -> torch.Tensor:
        """Attention of the batch's new tokens over the keys of their requests: all before them, or what they picked.

        q [T,H,Dqk] new tokens; k [S,H,Dqk], v [S,H,Dv] prefix and new tokens, request after request. Returns [T, H*Dv].
        Raises RuntimeError when the step was planned sparse, or masked and no indexer has left its picks.
        """
        if step.cu_queries is None or step.cu_keys is None:
            raise RuntimeError(
                f"attention on expanded keys was called on a batch that was planned sparse ({step.decision.reason})"
            )
        if step.decision.path != "masked":
            out, _ = dense_mha.dense_mha(
                q, k, v, step.cu_queries, step.cu_keys, scale, impl=self.impl_dense, with_lse=False
            )
        elif step.picks is None:
            raise RuntimeError("masked attention was called before any indexer of this step had left its picks")
        else:
            out, _ = masked_mha.masked_mha(
                q, k, v, step.picks, step.cu_queries, step.cu_keys, scale, impl=self.impl_masked
            )
        return out.flatten(1)
