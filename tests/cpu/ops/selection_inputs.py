"""Scores that a selection may get wrong: ties in the thousands, NaN, infinities, last bits, scales far apart."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Make = Callable[[int, int, torch.Generator], torch.Tensor]


def scores(kind: str, rows: int, width: int, g: torch.Generator) -> torch.Tensor:
    """f32 [rows, width] on the generator's device; rows begin on 16 bytes and have memory behind them to the next."""
    whole = torch.zeros(rows, -(-width // 32) * 32, device=g.device)
    whole[:, :width] = KINDS[kind](rows, width, g)
    return whole[:, :width]


def _normal(rows: int, width: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, width, generator=g, device=g.device)


def _ints(low: int, high: int) -> Make:
    return lambda rows, width, g: torch.randint(low, high, (rows, width), generator=g, device=g.device).int()


def _share(share: float, value: float, other: float | None = None) -> Make:
    """`value` in a share of the places; elsewhere `other`, or normal."""

    def make(rows: int, width: int, g: torch.Generator) -> torch.Tensor:
        rest = _normal(rows, width, g) if other is None else torch.tensor(other, device=g.device)
        return torch.where(torch.rand(rows, width, generator=g, device=g.device) < share, value, rest)

    return make


def _equal(value: float) -> Make:
    return lambda rows, width, g: torch.full((rows, width), value, device=g.device)


def _bits(low: int, high: int, also: int = 0, signs: bool = False) -> Make:
    def make(rows: int, width: int, g: torch.Generator) -> torch.Tensor:
        sign = _ints(0, 2)(rows, width, g) << 31 if signs else 0
        return (_ints(low, high)(rows, width, g) | also | sign).view(torch.float32)

    return make


def _sum_of_relus(rows: int, width: int, g: torch.Generator) -> torch.Tensor:
    return sum(_normal(rows, width, g).relu() for _ in range(4))


def _bursts(rows: int, width: int, g: torch.Generator) -> torch.Tensor:
    """The best lie together, in one block's stretch."""
    return _normal(rows, width, g) + 5 * (torch.arange(width, device=g.device) // 512 % 8 == 3)


def _outlier(rows: int, width: int, g: torch.Generator) -> torch.Tensor:
    return _normal(rows, width, g).index_fill_(1, torch.tensor([0], device=g.device), 1e30)


def _few_infinities(rows: int, width: int, g: torch.Generator) -> torch.Tensor:
    """Twenty at most, so that all of them are few enough to be ranked at once."""
    scores = _normal(rows, width, g)
    return scores.scatter_(
        1, torch.rand(rows, width, generator=g, device=g.device).topk(min(20, width)).indices, math.inf
    )


ONE = 0x3F800000

KINDS: dict[str, Make] = {
    "normal": _normal,
    "sum of relus": _sum_of_relus,
    "mostly zeros": lambda rows, width, g: (_normal(rows, width, g) - 1.5).relu(),
    "all equal": _equal(3.25),
    "five values": lambda rows, width, g: _ints(-2, 3)(rows, width, g).float(),
    "thousands of values": lambda rows, width, g: _ints(0, 3000)(rows, width, g).float(),
    "mostly NaN": _share(0.9, math.nan),
    "all NaN": _equal(math.nan),
    "infinities": _share(0.5, math.inf, -math.inf),
    "few infinities": _few_infinities,
    "minus infinity": _equal(-math.inf),
    "mostly minus infinity": _share(0.97, -math.inf),
    "signed zeros": _share(0.5, 0.0, -0.0),
    "denormals": _bits(0, 300, signs=True),
    "last bits": _bits(0, 1024, ONE),
    "last bits, negative": lambda rows, width, g: -_bits(0, 3, ONE)(rows, width, g),
    "any bits": _bits(0, 2**31 - 1, signs=True),
    "ascending": lambda rows, width, g: _normal(rows, width, g).sort(dim=1).values,
    "descending": lambda rows, width, g: _normal(rows, width, g).sort(dim=1, descending=True).values,
    "one outlier": _outlier,
    "heavy tails": lambda rows, width, g: _normal(rows, width, g) / _normal(rows, width, g),
    "up to infinity": lambda rows, width, g: _normal(rows, width, g) * 3e38,
    "bursts": _bursts,
}
