"""How the rows of a prefill attend: dense, or sparse in one of two ways.

- dense: with S <= k every token is picked, so prefill may run plain multi-head attention on expanded keys and values:
  the same result with a third of the arithmetic (192 + 128 values a key in V3.2 instead of 576 + 512);
- masked: the same on longer contexts, with a mask of what each row picked (masked_prefill.py);
- sparse: absorbed attention over the picked rows of the cache;
- graph: the same, run between the segments of a prefill CUDA graph, which holds the rest of the model. A graph keeps
  one way of attending, and this is the one that fits every length;
- whole: sparse on all tokens, recorded in a graph with the rest of the model (held_step.py);
- whole_dense: dense, recorded in the same way, for batches without a cached token;
- whole_scored: sparse on picks that are made in the graph, row by row as in decode, for a few new tokens.

One `Decision` is made per batch; the planner that chooses the model's forward method and the executor that runs it read
that object and nothing else: two decisions could differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_dsa_plugin.backend.masked_prefill import MaskedPrefill

Path = Literal["dense", "masked", "sparse", "graph", "whole", "whole_dense", "whole_scored"]


@dataclass(frozen=True)
class Decision:
    """path: how the batch attends. reason: why, in words."""

    path: Path
    reason: str

    @property
    def expanded(self) -> bool:
        """Whether the model hands in expanded keys and values instead of absorbed queries."""
        return self.path in ("dense", "masked", "whole_dense")


SPARSE_DECODE = Decision("sparse", "decode is always sparse")
# Tokens of a prefill's graphs. Of more tokens the GPU is busy longer than the host takes to launch them: on an H200, 16
# layers with 16 heads, the first token came after 22.5 ms instead of 35.3 (1024 tokens), 28.4 instead of 37.6 (2048)
# and 109.8 instead of 111.9 (8192, outside in both), 2026-11-30. A batch takes the next larger graph; each is recorded
# at start, so there are fewer than SGLang would make.
GRAPH_SIZES = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
GRAPH_TOKENS = GRAPH_SIZES[-1]
IN_GRAPH = Decision("graph", "the prefill is a replay of a CUDA graph")
WHOLE_GRAPH = Decision("whole", "the prefill is a replay of a CUDA graph, and every request fits in index_topk")
# Where a batch is dense the whole forward is in the graph, and the host, which takes 22 to 45 ms to launch it, has
# nothing to do. These are for several prompts at once, up to SGLang's chunk.
DENSE_GRAPH_SIZES = (2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
WHOLE_DENSE = Decision("whole_dense", "the prefill is a replay of a CUDA graph, and every request is new and short")
# Of so few rows scoring each on its own reads the keys often enough to be felt only behind very long contexts.
SCORED_TOKENS = 256
WHOLE_SCORED = Decision("whole_scored", "the prefill is a replay of a CUDA graph that picks row by row")
# Expanded keys and values of one layer alive at once on the dense path: 37,000 keys of 128 heads, where a chunk of new
# tokens has 8192 or 16384. Prefixes that many requests share are read from the cache for each of them.
EXPANDED_BYTES = 4 << 30


def decide(
    *,
    prefix: Sequence[int],
    extend: Sequence[int],
    threshold: int,
    capacity: int,
    masked: MaskedPrefill,
    allowed: str | None = None,
) -> Decision:
    """The path of one prefill batch of `extend[b]` new tokens after `prefix[b]` cached ones.

    threshold: longest length that runs dense (default index_topk; above it dense attends to more tokens than the model
    was trained to). capacity: most keys expanded at once on the dense path. masked: what judges the masked path.
    allowed: None, or why expanded keys are ruled out.
    """
    if allowed is not None:
        return Decision("sparse", allowed)
    longest = max((p + e for p, e in zip(prefix, extend)), default=0)
    if longest > threshold:
        reason = f"longest request {longest} > threshold {threshold}"
        fits, why = masked.judge(prefix, extend)
        return Decision("masked" if fits else "sparse", f"{reason}; {why}")
    keys = sum(prefix) + sum(extend)
    if keys > capacity:
        return Decision("sparse", f"{keys} keys > chunk capacity {capacity}")
    return Decision("dense", f"longest request {longest} <= threshold {threshold}")
