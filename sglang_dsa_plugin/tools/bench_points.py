"""What `sglang-dsa bench tune` measures: points, and the choices that follow from them; see bench_tune."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import LATENT_DIM
from sglang_dsa_plugin.ops import dense_mha, index_select, mha_keys
from sglang_dsa_plugin.support_row import MORE_ROWS, OURS, ROW_STEPS, SOME_ROWS
from sglang_dsa_plugin.tools import bench_cases, bench_index_cases, bench_run, bench_step, bench_timing
from sglang_dsa_plugin.tools.bench_cases import SCALE, SHORT, Case, Sizes
from sglang_dsa_plugin.tools.bench_inputs import Maker
from sglang_dsa_plugin.tools.bench_rivals import Inputs
from sglang_dsa_plugin.tools.bench_timing import Clock

OPERATOR = "sparse_mla"
DENSE, SELECT = "dense", "index_select"
# Another package's kernel has to be worth its import and its padding.
MARGIN = 0.97
# Of decode: the sizes of SGLang's graphs up to 16 rows, to which other batches are padded, and a large one.
DECODE_ROWS = (1, 2, 4, 8, 12, SOME_ROWS, MORE_ROWS)
STEP_TOKENS = 8192


@dataclass
class Point:
    """One shape. us: microseconds a call, medians, by implementation of sparse attention (of fewer than SOME_ROWS rows
    of the decode step that it is part of), and for the two parts of a prefill that all of them share, DENSE and
    SELECT.  failed: why one has no figure.
    """

    layout: str
    heads: int
    rows: int
    tokens: int
    us: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def sparse(self) -> dict[str, float]:
        """Figures of sparse attention alone."""
        return {name: us for name, us in self.us.items() if name not in (DENSE, SELECT)}


def shapes(quick: bool) -> Iterator[tuple[Case, Case | None, Point]]:
    """(a case with sparse attention, selection where the point is a prefill, the point to fill)."""
    for layout in SHORT:
        for heads in (16, 128) if quick else (8, 16, 32, 64, 128):
            for rows in (1, SOME_ROWS, MORE_ROWS) if quick else DECODE_ROWS:
                case = decode_case(layout, heads, rows)
                yield case, None, Point(layout, heads, rows, case.tokens)
            for rows, tokens in ((4096, 16384),) if quick else ((512, 8192), (4096, 4096), (4096, 32768)):
                sizes = replace(Sizes(), cached=tokens, prefill=rows)
                point = Point(layout, heads, rows, tokens)
                yield bench_cases.prefill(sizes, layout, heads), bench_index_cases.ragged_select(sizes, tokens), point


def decode_case(layout: str, heads: int, rows: int) -> Case:
    """Sparse attention alone, but of few rows within a decode step: kernels of a few microseconds overlap with those
    ahead and behind, one of one launch more than one of two.
    """
    if rows >= SOME_ROWS:
        return bench_cases.decode(Sizes(cached=32768), layout, heads, rows)
    return replace(bench_step.step(Sizes(), layout, heads, STEP_TOKENS, rows), ours=bench_step.run_with_attention)


def measure_all(
    wanted: Iterator[tuple[Case, Case | None, Point]], clock: Clock, device: torch.device, rounds: int, l2_bytes: int
) -> Iterator[Point]:
    """The points with their figures, in order."""
    for attention, selection, point in wanted:
        sets = bench_timing.sets_for(attention.set_bytes, l2_bytes)
        contestants = {name: _attend(attention, name) for name in implementations(point, device)}
        _figures(point, clock, device, rounds, attention, sets, contestants)
        if selection is not None:
            pick = {SELECT: lambda i: index_select.ragged(i.q, i.k, i.k_scale, i.gate, i.start, i.end, i.k_picks)}
            _figures(point, clock, device, rounds, selection, bench_timing.SETS_PAST_L2, pick)
            _figures(
                point, clock, device, rounds, dense_case(attention, point), bench_timing.SETS_PAST_L2, {DENSE: dense}
            )
        yield point


def _attend(attention: Case, name: str) -> Callable[[Inputs], Any]:
    return lambda inputs: attention.ours(inputs, name)


def implementations(point: Point, device: torch.device) -> list[str]:
    """Names of the rows of the support table that can run the point, torch aside."""
    found = []
    for row in support.rows(OPERATOR):
        features = {
            "layout": point.layout,
            "heads": point.heads,
            "k": 2048,
            "dtype": torch.bfloat16,
            "rows": point.rows,
        }
        try:
            support.choose(OPERATOR, device=device, impl=row.name, **features)
        except support.NotServed:
            continue
        if row.name != "torch":
            found.append(row.name)
    return found


def _figures(
    point: Point,
    clock: Clock,
    device: torch.device,
    rounds: int,
    case: Case,
    sets: int,
    contestants: dict[str, Callable[[Inputs], Any]],
) -> None:
    """Fill in the medians of the contestants on the case's inputs, interleaved with each other."""
    try:
        inputs = [case.make(Maker(device, seed)) for seed in range(sets)]
        passes = bench_timing.passes_for(sets, case.set_bytes)
        recorded: dict[str, Any] = {}
        for name, run in contestants.items():
            try:
                recorded[name] = clock.record([_bound(run, one) for one in inputs] * passes)
            except Exception as error:
                point.failed[name] = bench_run.in_words(error)
        for name, samples in bench_timing.interleave(clock, recorded, sets * passes, rounds).items():
            point.us[name] = round(bench_timing.Spread.of(samples).median, 2)
    except Exception as error:
        point.failed |= {name: bench_run.in_words(error) for name in contestants if name not in point.us}
    bench_run.free()


def _bound(run: Callable[[Inputs], Any], inputs: Inputs) -> Callable[[], Any]:
    return lambda: run(inputs)


def dense_case(attention: Case, point: Point) -> Case:
    """Latents of all tokens and the weight that expands them to keys of 128 and values of 128 a head."""

    def make(maker: Maker) -> Inputs:
        rows, heads, tokens = point.rows, point.heads, point.tokens
        return Inputs(
            q=maker.normal(rows, heads, 192),
            latent=maker.normal(tokens, LATENT_DIM),
            rope=maker.normal(tokens, 64),
            weight=maker.normal(LATENT_DIM, heads * 256) * LATENT_DIM**-0.5,
            cu_q=torch.tensor([0, rows], dtype=torch.int32, device=maker.device),
            cu_k=torch.tensor([0, tokens], dtype=torch.int32, device=maker.device),
        )

    return replace(attention, make=make)


def dense(inputs: Inputs) -> Any:
    """What a layer does on the dense path from the cached latents on, for bf16 rows."""
    heads = inputs.q.shape[1]
    expanded = (inputs.latent @ inputs.weight).view(-1, heads, 256)
    k_nope, v = expanded.split([128, 128], dim=2)
    k = mha_keys.join(k_nope, inputs.rope)
    return dense_mha.dense_mha(inputs.q, k, v, inputs.cu_q, inputs.cu_k, SCALE, with_lse=False)


def choices(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The fastest implementation of sparse attention for each layout, number of heads and step of rows.

    Of several points in a step the geometric mean counts. Only implementations measured at all of them are judged, and
    one of another package has to be faster than the faster of ours by 3 %.
    """
    groups: dict[tuple[str, int, int], list[Point]] = {}
    for point in points:
        step = max(s for s in ROW_STEPS if s <= point.rows)
        groups.setdefault((point.layout, point.heads, step), []).append(point)
    found = []
    for (layout, heads, step), some in groups.items():
        names = set.intersection(*(set(point.sparse) for point in some))
        if not names:
            continue
        means = {n: math.exp(sum(math.log(point.us[n]) for point in some) / len(some)) for n in names}
        best = min(means, key=lambda name: means[name])
        ours = min(OURS & means.keys(), key=lambda name: means[name], default=best)
        if means[best] > MARGIN * means[ours]:
            best = ours
        entry = {"operator": OPERATOR, "layout": layout, "heads": heads, "min_rows": step, "implementation": best}
        found.append(entry | {"us": {name: round(us, 2) for name, us in sorted(means.items())}})
    return found


def dense_up_to(points: Sequence[Point]) -> list[dict[str, Any]]:
    """For each layout, heads and rows of a prefill: the longest measured S up to which, without a gap, the dense way
    took no longer than selection and the fastest sparse attention together; 0 when it never did.
    """
    groups: dict[tuple[str, int, int], list[Point]] = {}
    for point in points:
        if DENSE in point.us and SELECT in point.us and point.sparse:
            groups.setdefault((point.layout, point.heads, point.rows), []).append(point)
    found = []
    for (layout, heads, rows), some in groups.items():
        longest = 0
        for point in sorted(some, key=lambda p: p.tokens):
            if point.us[DENSE] > point.us[SELECT] + min(point.sparse.values()):
                break
            longest = point.tokens
        found.append({"layout": layout, "heads": heads, "rows": rows, "tokens": longest})
    return found


def line(point: Point) -> str:
    """A point in one line of text."""
    figures = ", ".join(f"{name} {us:.1f}" for name, us in point.us.items())
    failed = "".join(f"; {name} failed: {why}" for name, why in point.failed.items())
    return f"{SHORT[point.layout]}, {point.heads} heads, {point.rows} rows, S={point.tokens}: {figures}{failed}"
