"""How close a prompt comes to a discrete choice going the other way: picks at the k-th place, experts at the last one.

Two exact implementations in float32 round differently, so where the k-th and the next score are closer than that
rounding they may pick different tokens, and log-probabilities then move by whole units at that position and at every
later one that attends to it. Such a prompt says nothing about either. `steady_prompt` makes prompts without one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.oracle import hf

# A float32 and a float64 run of the default models (S 1000) differ by 1e-6 of the row in the median, 7e-6 at most.
FLOOR = 5e-6


class _Choices(TorchFunctionMode):
    """Sees every top-k of a Hugging Face forward pass and keeps the margin of those that choose picks or experts."""

    def __init__(self, rows: int, picks: int, experts: int) -> None:
        super().__init__()
        self.rows, self.picks, self.experts = rows, picks, experts
        self.margins: dict[str, torch.Tensor] = {kind: torch.full((rows,), torch.inf) for kind in ("picks", "experts")}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "topk":
            scores, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
            if scores.shape == (1, self.rows, self.rows) and k == min(self.picks, self.rows):
                self._keep("picks", scores[0], k, causal=True)
            elif scores.dim() == 2 and len(scores) == self.rows and k == self.experts:
                self._keep("experts", scores, k, causal=False)
        return func(*args, **kwargs)

    def _keep(self, kind: str, scores: torch.Tensor, k: int, causal: bool) -> None:
        if k >= scores.shape[-1]:
            return
        first = k if causal else 0
        scores = scores[first:].float()
        best = scores.sort(-1, descending=True).values[:, k - 1 : k + 1]
        real = scores.tril(first) if causal else scores
        margin = -best.diff().squeeze(-1) / real.abs().amax(-1)
        self.margins[kind][first:] = self.margins[kind][first:].minimum(margin)


@torch.no_grad()
def margins(model_dir: str | Path, token_ids: Sequence[int], index_topk: int | None = None) -> dict[str, torch.Tensor]:
    """Smallest margin over the layers at each position: {"picks": f32 [S], "experts": f32 [S]}.

    A margin is the k-th best score less the next, over the row's largest magnitude; inf where there is no choice.
    """
    model = hf.load(model_dir)
    config = json.loads((Path(model_dir) / "config.json").read_text())
    k = index_topk or config["index_topk"]
    found = hf.indexers(model)
    kept = [indexer.index_topk for indexer in found]
    try:
        for indexer in found:
            indexer.index_topk = k
        with _Choices(len(token_ids), k, config["num_experts_per_tok"]) as choices:
            model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    finally:
        for indexer, before in zip(found, kept):
            indexer.index_topk = before
    return choices.margins


def steady_prompt(
    model_dir: str | Path, length: int, seed: int = 0, index_topk: int | None = None, floor: float = FLOOR
) -> list[int]:
    """`length` random byte tokens of which no position comes closer than `floor` to another choice in any layer.

    A position only depends on the tokens up to it, so the tokens from the first bad position on are drawn again until
    none is left. Kept on disk beside the oracle's results.
    """
    name = f"{hf.model_hash(model_dir)} {length} {seed} {index_topk} {floor}"
    stored = hf.cache_dir() / f"prompt-{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
    if stored.exists():
        return json.loads(stored.read_text())
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (length,), generator=generator)
    for _ in range(200):
        both = margins(model_dir, tokens.tolist(), index_topk)
        bad = (torch.minimum(both["picks"], both["experts"]) < floor).nonzero().flatten()
        if not len(bad):
            stored.parent.mkdir(parents=True, exist_ok=True)
            stored.write_text(json.dumps(tokens.tolist()))
            return tokens.tolist()
        tokens[bad[0] :] = torch.randint(0, 256, (length - int(bad[0]),), generator=generator)
    raise RuntimeError(f"steady_prompt: no prompt of {length} tokens keeps a margin of {floor} in 200 tries")
