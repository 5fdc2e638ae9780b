"""Whether both sides of a case did the same work: a rival that is called wrongly may be fast for that reason.

This is no check of correctness, which `sglang-dsa check` and the tests are; the limits are wide.
"""

from __future__ import annotations

from typing import Any

import torch

# Kind of a result -> the largest difference that rounding explains.
LIMITS = {
    "attention": 0.03,  # weights rounded to bf16, on either side
    "scores": 0.01,  # sums in another order
    "picks": 0.01,  # and what that moves across the last pick; ties
    "copies": 0.0,
}


def difference(kind: str, ours: Any, theirs: torch.Tensor) -> float:
    """How far apart two results are, 0 for equal ones.

    attention: ours (out, lse), theirs out; largest error over the largest value.  scores: likewise, over the columns
    that ours does not give as -inf.  copies: likewise, over all, and of each part.  picks: int [R, K] in any order; the
    share of ours that theirs lacks.
    """
    if kind == "attention":
        return _relative(ours[0], theirs.reshape(ours[0].shape))
    if kind == "copies":
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else ((ours, theirs),)
        return max(_relative(one, other) for one, other in pairs)
    if kind == "scores":
        worst = 0.0
        # Row by row of some megabytes: a prefill's scores are large.
        for one, other in zip(ours.split(256), theirs.split(256)):
            seen = one > -torch.inf
            worst = max(worst, _relative(one[seen], other[:, : one.shape[1]][seen]))
        return worst
    mine, other = ours.sort(dim=1).values, theirs.sort(dim=1).values.contiguous()
    at = torch.searchsorted(other, mine.contiguous()).clamp(max=other.shape[1] - 1)
    valid = mine >= 0
    missing = valid & (other.gather(1, at) != mine)
    return float(missing.sum()) / max(1, int(valid.sum()))


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.numel():
        return 0.0
    error = float((one.float() - other.float()).abs().max() / one.float().abs().max().clamp(min=1e-30))
    return error if error == error else float("inf")
