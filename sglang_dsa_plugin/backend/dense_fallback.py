"""Dense attention instead of sparse: when, and who is told.

With S <= k every token is picked, so prefill may run plain multi-head attention on expanded keys and values: the same
result with a third of the arithmetic (192 + 128 values a key in V3.2 instead of 576 + 512). One `Decision` is made per
batch; the planner that chooses the model's forward method and the executor that runs it read that object and nothing
else (fault U57 is two decisions).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """dense: run dense attention. reason: why, in words."""

    dense: bool
    reason: str


SPARSE_DECODE = Decision(False, "decode is always sparse")


def decide(
    *, plain_prefill: bool, max_length: int, total_keys: int, threshold: int, capacity: int, allowed: str | None = None
) -> Decision:
    """Dense or sparse for one prefill batch.

    plain_prefill: a prefill (chunk or mixed batch included), not speculative and not inside a captured graph.
    max_length: longest prefix + extension of the batch. total_keys: their sum. threshold: longest length that runs
    dense (default index_topk; above it dense attends to more tokens than the model was trained to). capacity: most
    keys expanded at once. allowed: None, or why dense attention is ruled out for this server.
    """
    if allowed is not None:
        return Decision(False, allowed)
    if not plain_prefill:
        return Decision(False, "not a plain prefill")
    if max_length > threshold:
        return Decision(False, f"longest request {max_length} > threshold {threshold}")
    if total_keys > capacity:
        return Decision(False, f"{total_keys} keys > chunk capacity {capacity}")
    return Decision(True, f"longest request {max_length} <= threshold {threshold}")


class PathCounter:
    """Counts prefill batches and rows by path, for the log, the metrics and the tests."""

    def __init__(self) -> None:
        self.batches: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()

    def count(self, decision: Decision, rows: int) -> None:
        """Note one prefill batch of `rows` query tokens."""
        path = "dense" if decision.dense else "sparse"
        self.batches[path] += 1
        self.rows[path] += rows
