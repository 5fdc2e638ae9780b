"""What sparse, dense and masked attention share, in f32: the size of a tile, and its two steps."""

from __future__ import annotations

import torch

from sglang_dsa_plugin.kernels.torch_impl import workspace


def tile_values(device: torch.device, per_thread: int = 1 << 20) -> int:
    """f32 values of a tile alive at once; on a CPU for each thread, so that they stay in its share of the cache."""
    return per_thread * torch.get_num_threads() if device.type == "cpu" else 64 << 20


def scaled_scores(q: torch.Tensor, k_t: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * q @ k_t for q [B, M, D] and k_t [B, D, N], f32; lies in the workspace.

    The scale is applied to the product, not to q: then bf16 inputs reach the multiplier unchanged, and a reduced f32
    matmul precision set by the process (TF32 keeps 11 bits) does not touch them.
    """
    scores = workspace.take("scores", (q.shape[0], q.shape[1], k_t.shape[2]), torch.float32, q.device)
    return torch.baddbmm(scores, q, k_t, beta=0, alpha=scale, out=scores)


def softmax_and_lse(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension, in the workspace, and its natural log-sum-exp.

    The largest score s has weight w = exp(s - lse), so lse = s - log w: two reductions instead of another exp pass.
    """
    weights = workspace.take("weights", tuple(scores.shape), torch.float32, scores.device)
    torch.softmax(scores, dim=-1, out=weights)
    return weights, scores.amax(dim=-1).sub_(weights.amax(dim=-1).log_())
