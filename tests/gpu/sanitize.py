"""One small run of each kernel path on a GPU, for compute-sanitizer: a line a path, exit code 1 if one is wrong.

    compute-sanitizer --tool memcheck --launch-timeout 300 --report-api-errors no --error-exitcode 9 \
        python -m tests.gpu.sanitize
    compute-sanitizer --tool racecheck --launch-timeout 300 --print-limit 0 --log-file race.%p \
        --kernel-name "$(python -m tests.gpu.sanitize --filter)" python -m tests.gpu.sanitize --racecheck
    python -m tests.gpu.racecheck race.*

Run it once without the sanitizer first: then the kernels are compiled. With `--part 1/8` to `8/8` eight processes share
the paths: most of the time is the host's. Tensors are allocated one by one
(PYTORCH_NO_CUDA_MEMORY_CACHING), or an access past a tensor would land in memory that the allocator holds anyway.
--report-api-errors no: memcheck would count each refusal of the driver as an error. Triton's loader tries an attribute
of newer drivers first where a kernel takes more than 48 KiB of shared memory (cuFuncSetAttribute, INVALID_VALUE) and
falls back to the old one. A call that fails for good raises in Python, and its path is reported as wrong.
racecheck looks at shared memory of our own kernels; --filter prints their names as its option wants them, --racecheck
builds all in the form that it can follow, and tests/gpu/racecheck.py judges its reports. Take a sanitizer of 2026 (pip
install nvidia-cuda-sanitizer-api): that of CUDA 13.0 also reports what Triton hands to the warps it starts.
FlashInfer builds a C++ module at the first call, which takes minutes: its rows are run with --with-jit only.

Paths: every row of the support table but torch's, by the cases of `sglang-dsa check` (one an operator, implementation,
layout and number of heads), and by those below, which take the other ways through a kernel: other dtypes, many rows,
long rows, one split, a sink, queries in two parts, slots beside positions, a budget of few bytes. Answers are held
against fp64 or the torch implementation. Scores with a selection under the name `triton` take the selection in CUDA C++
where it is the faster one, so the Triton kernels have cases of the selection alone.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import pkgutil
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":  # tests import this module, and what they measure is the allocator's
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import FP8, INDEX_PAGE_BYTES, PAGE_SIZE
from sglang_dsa_plugin.kernels import cuda as our_sources
from sglang_dsa_plugin.kernels import triton as our_kernels
from sglang_dsa_plugin.kernels.cuda import sparse_mla as cuda_sparse_mla
from sglang_dsa_plugin.ops import (
    index_keys,
    index_queries,
    index_scores,
    index_select,
    quant,
    select,
    sparse_mla,
)
from sglang_dsa_plugin.support_row import OURS
from sglang_dsa_plugin.tools import check_cases, check_judges

Case = check_judges.Case
CPU = torch.device("cpu")
SCALE = 192**-0.5
# Hopper adds fp8 products in 14 bits or so; data here are small integers, so every score is exact.
EXACT = check_judges.close(1e-6, 1e-6)
# Scores and selections of other packages refuse a budget below the scores of one row.
STRETCHES = "stretches of a long row"


def paths(
    device: torch.device | str, sm: int | None = None, ours: bool = False, with_jit: bool = False
) -> Iterator[tuple[Case, str]]:
    """(case, implementation) of every path on `device`; sm: as if it were of this SM. ours: no other package's.
    with_jit: those as well whose package builds a module for minutes before it runs.
    """
    seen = set()
    for case in [*check_cases.cases(), *_more_cases()]:
        for row in support.rows(case.operator):
            if row.name == "torch" or (ours and row.name not in OURS) or (_builds_first(row) and not with_jit):
                continue
            if case.label == f"+{STRETCHES}" and row.name != "triton":
                continue
            try:
                support.choose(case.operator, device=device, impl=row.name, sm=sm, **case.features)
            except support.NotServed:
                continue
            extra = case.label if case.label.startswith("+") else ""
            key = (case.operator, row.name, case.features.get("layout"), _heads_of(case), extra)
            if key not in seen:
                seen.add(key)
                yield case, row.name


def _builds_first(row: support.Implementation) -> bool:
    """Whether it calls FlashInfer, on its own or after scores of another package."""
    return "flashinfer" in (row.package, *(value for _, value in row.arguments))


def _heads_of(case: Case) -> object:
    return case.features.get("heads") if case.operator in ("sparse_mla", "dense_mha") else None


def kernel_names() -> list[str]:
    """Names under which our kernels are launched: of all Triton functions those named as kernels are, and what sources
    in CUDA C++ declare.
    """
    names: set[str] = set()
    for found in pkgutil.iter_modules(our_kernels.__path__, our_kernels.__name__ + "."):
        names |= _compiled_of(importlib.import_module(found.name))
    names = {name for name in names if name.endswith("_kernel") or name.startswith("gather_")}
    for source in Path(our_sources.__path__[0]).glob("*.cu"):
        names.update(
            re.findall(r'extern "C" __global__ void(?: __launch_bounds__\([^)]*\))?\s+(\w+)', source.read_text())
        )
    return sorted(names)


def _compiled_of(module: ModuleType) -> set[str]:
    # Triton's and Gluon's functions keep the Python function they were made of.
    own = [value for value in vars(module).values() if hasattr(value, "fn") and hasattr(value, "arg_names")]
    return {value.fn.__name__ for value in own if value.fn.__module__ == module.__name__}


def _by_torch(operator: str, label: str, features: dict[str, object], run: object, judge: object) -> Case:
    """A case whose answer is that of the torch implementation on a CPU."""
    return Case(operator, f"+{label}", features, run, run(CPU, "torch"), judge)


def _more_cases() -> Iterator[Case]:
    yield from _more_scoring()
    yield from _more_selection()
    yield from _more_of_the_front()
    yield from _more_attention()


def _integers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def _scoring_inputs(rows: int, heads: int, pages: int, requests: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """(q, pages, gate, lengths, page_table, row_to_request) with scores that are exact in f32."""
    q = _integers(-2, 3, rows, heads, 128, seed=1).float().to(dtype)
    keys = _integers(-2, 3, pages, PAGE_SIZE, 128, seed=2).float().to(dtype)
    if dtype == FP8:
        scale = torch.full((pages, PAGE_SIZE), 0.5)
        parts = (keys.view(torch.uint8).view(pages, -1), scale.view(torch.uint8).view(pages, -1))
        keys = torch.cat(parts, dim=1)
        assert keys.shape[1] == INDEX_PAGE_BYTES
    each = pages // requests
    table = torch.arange(pages, dtype=torch.int32).flip(0)[: requests * each].view(requests, each)
    owner = torch.arange(rows, dtype=torch.int32) * requests // rows
    lengths = (_integers(each * 32, each * 64 + 1, rows, seed=3)).int()
    lengths[0] = 3
    return [q, keys, _integers(-3, 8, rows, heads, seed=4).float(), lengths, table, owner]


def _more_scoring() -> Iterator[Case]:
    for label, rows, heads, pages, requests, dtype in (
        ("a row a request, bf16", 5, 64, 20, 5, torch.bfloat16),
        ("draft rows, fp8", 12, 32, 30, 3, FP8),
        ("many rows, fp8", 200, 64, 8, 2, FP8),
        ("many rows, f32", 40, 16, 8, 2, torch.float32),
    ):
        given = _scoring_inputs(rows, heads, pages, requests, dtype)
        width = int(given[3].max())

        def run(d: torch.device, i: str, given: list[torch.Tensor] = given, width: int = width) -> tuple:
            return (index_scores.paged(*(t.to(d) for t in given), width, impl=i),)

        yield _by_torch("index_scores_paged", label, {"heads": heads, "dtype": dtype}, run, EXACT)


def _more_selection() -> Iterator[Case]:
    for label, rows, pages, requests, budget, slots in (
        (STRETCHES, 2, 40, 1, 4 * (2 * 64 + 64 * 10), False),
        ("groups of rows", 150, 8, 2, 4 * 1024 * 20, True),
        ("one row over all processors", 1, 700, 1, None, False),
        ("whole rows in a program", 150, 90, 1, None, True),
        ("many rows of each request", 530, 8, 2, None, True),
    ):
        given = _scoring_inputs(rows, 16, pages, requests, FP8)

        def run(
            d: torch.device,
            i: str,
            given: list[torch.Tensor] = given,
            budget: int | None = budget,
            slots: bool = slots,
        ) -> tuple:
            tensors = (t.to(d) for t in given)
            return (index_select.paged(*tensors, 64, slots=slots, budget_bytes=budget, impl=i),)

        yield _by_torch("index_select_paged", label, {"heads": 16, "k": 64, "dtype": FP8}, run, check_judges.equal)
    for label, rows, pages, requests in (
        ("slots beside positions, one row", 1, 700, 1),
        ("slots beside positions, many rows", 150, 8, 2),
    ):
        given = _scoring_inputs(rows, 16, pages, requests, FP8)

        def both(d: torch.device, i: str, given: list[torch.Tensor] = given) -> tuple:
            slots = torch.full((given[0].shape[0], 64), -7, dtype=torch.int32, device=d)
            picks = index_select.paged(*(t.to(d) for t in given), 64, slots_out=slots, impl=i)
            return picks, slots

        yield _by_torch("index_select_paged", label, {"heads": 16, "k": 64, "dtype": FP8}, both, check_judges.equal)
    scores, starts = _integers(0, 50, 7, 5000, seed=5).float(), _integers(0, 40, 7, seed=6)
    lengths = torch.tensor([0, 1, 64, 65, 4900, 3000, 4960], dtype=torch.int32)

    def forced(d: torch.device, i: str) -> tuple:
        return (select.topk(scores.to(d), lengths.to(d), 64, starts.to(d), 3, 5, impl=i),)

    yield _by_torch("topk", "windows and forced tokens", {"k": 64}, forced, check_judges.equal)
    # A row's best spread over many values, and ties by the thousand.
    for label, rows, pages, values in (
        ("one long row", 1, 700, 1 << 20),
        ("ties in 16 rows", 16, 90, 5),
        ("two values in one row", 1, 700, 2),
        ("ties in 150 rows", 150, 90, 5),
        ("ties in 150 long rows", 150, 270, 5),
        ("300 rows", 300, 130, 1 << 20),
        ("ties in 300 rows", 300, 130, 1000),
    ):
        many, table = _integers(0, values, rows, pages * PAGE_SIZE, seed=7).float(), torch.arange(pages).flip(0)[None]
        some = _integers(pages * 32, pages * PAGE_SIZE, rows, seed=8)

        def selected(
            d: torch.device, i: str, given: tuple = (many, some), table: torch.Tensor = table, rows: int = rows
        ) -> tuple:
            scores, lengths = (t.to(d) for t in given)
            owner = torch.zeros(rows, dtype=torch.int32, device=d)
            return (select.topk_slots(scores, lengths, 64, table.int().to(d), owner, impl=i),)

        yield _by_torch("topk_slots", label, {"k": 64}, selected, check_judges.equal)


def _more_of_the_front() -> Iterator[Case]:
    g = torch.Generator().manual_seed(7)
    angle = torch.randn(300, 32, generator=g)
    cos_sin, positions = torch.cat([angle.cos(), angle.sin()], dim=1), _integers(0, 300, 33, seed=8).long()
    projected, weight = torch.randn(33, 128, generator=g).bfloat16(), torch.randn(128, generator=g) + 1
    slots = torch.randperm(4 * PAGE_SIZE, generator=g)[:33]
    slots[4] = -1

    def keys(d: torch.device, i: str) -> tuple:
        pages = torch.zeros(4, PAGE_SIZE, 128, dtype=torch.bfloat16, device=d)
        given = (t.to(d) for t in (slots, projected, weight))
        index_keys.store(pages, *given, None, 1e-6, positions.to(d), cos_sin.to(d), "interleaved", impl=i)
        return (pages.flatten(0, 1),)

    yield _by_torch("index_keys_store", "bf16, interleaved, RMS", {}, keys, check_judges.close(1 / 64))
    wide, gates = torch.randn(33, 16 * 128, generator=g).bfloat16(), torch.randn(33, 16, generator=g)

    def queries(d: torch.device, i: str) -> tuple:
        given = (t.to(d) for t in (wide, gates, positions, cos_sin))
        return index_queries.prepare(*given, "interleaved", torch.bfloat16, impl=i)

    yield _by_torch("index_queries", "bf16, interleaved", {"heads": 16}, queries, check_judges.close(1 / 64))


def _more_attention() -> Iterator[Case]:
    g = torch.Generator().manual_seed(9)
    latent, rope = torch.randn(300, 512, generator=g), torch.randn(300, 64, generator=g)
    for layout, heads, rows, k, dtype in (
        ("bf16_1152", 16, 140, 64, torch.bfloat16),
        ("bf16_1152", 8, 1, 2048, torch.bfloat16),
        ("bf16_1152", 32, 3, 130, torch.bfloat16),
        ("fp8_656", 16, 140, 64, torch.bfloat16),
        ("fp8_656", 8, 1, 2048, torch.bfloat16),
        ("fp8_576", 16, 140, 64, torch.bfloat16),
        # Six tiles of picks, so that buffers are used again, and heads that are not there.
        ("bf16_1152", 72, 140, 330, torch.bfloat16),
        ("fp8_656", 72, 140, 330, torch.bfloat16),
        ("bf16_1152", 8, 140, 330, torch.bfloat16),
        ("fp8_656", 8, 140, 330, torch.bfloat16),
        # As many rows as the portable kernel copies in another way from.
        ("bf16_1152", 40, 512, 330, torch.bfloat16),
        ("fp8_576", 72, 140, 330, torch.bfloat16),
        ("bf16_1152", 5, 3, 100, torch.float32),
        ("fp8_656", 5, 3, 100, torch.float32),
    ):
        kv = quant.reference_quantize_latent(latent, rope, layout, check_cases.KV_SCALE if layout == "fp8_576" else 1.0)
        q = torch.randn(rows, heads, 576, generator=g).to(dtype)
        slots, sink = _integers(0, 300, rows, k, seed=10), torch.randn(heads, generator=g)
        lengths = torch.full((rows,), k - 3, dtype=torch.int32)
        slots[-1, 17:] = -1
        want = sparse_mla.reference(q, kv, slots, SCALE, layout, _scale_of(layout), sink, lengths)
        spread = check_judges.spread_of(q, kv, slots, SCALE, layout, _scale_of(layout), lengths)

        def run(
            d: torch.device,
            i: str,
            given: tuple = (kv, slots),
            rest: tuple = (sink, lengths),
            layout: str = layout,
            q: torch.Tensor = q,
            parts: bool = False,
        ) -> tuple:
            tensors, more = (t.to(d) for t in given), (t.to(d) for t in rest)
            more = (*tensors, SCALE, layout, _scale_of(layout), *more)
            q = q.to(d)
            if parts:
                return sparse_mla.sparse_mla(q[..., :512], *more, q_rope=q[..., 512:].contiguous(), impl=i)
            return sparse_mla.sparse_mla(q, *more, impl=i)

        features = {"layout": layout, "heads": heads, "k": k, "dtype": dtype}
        label = f"+{layout}, {heads} heads, {rows} rows of {k} picks, {str(dtype).removeprefix('torch.')}, a sink"
        answer = (*want, spread)
        yield SinkCase("sparse_mla", label, features, run, answer, check_judges.attention)
        in_parts = functools.partial(run, parts=True)
        yield SinkCase("sparse_mla", f"{label}, q in two parts", features, in_parts, answer, check_judges.attention)


class SinkCase(Case):
    """Attention with a sink, which adapters of other packages bring in when the output has been rounded already: it is
    rounded twice then (docs/operators.md). FlashMLA on bf16 rows takes the sink itself.
    """

    def share(self, device: torch.device, implementation: str) -> float:
        rounded = functools.partial(check_judges.rounded_attention, rounded=1 if implementation == "flash_mla" else 2)
        plain = Case(self.operator, self.label, self.features, self.run, self.want, self.judge, rounded)
        return plain.share(device, implementation)


def _scale_of(layout: str) -> float:
    return check_cases.KV_SCALE if layout == "fp8_576" else 1.0


def part(text: str) -> tuple[int, int]:
    """`I/N` as the index of the first path and the step to the next. Raises ValueError where I is not in 1..N."""
    which, _, parts = text.partition("/")
    if not (which.isdecimal() and parts.isdecimal() and 1 <= int(which) <= int(parts)):
        raise ValueError(f"--part must be I/N with I from 1 to N, for example 2/8, got {text!r}")
    return int(which) - 1, int(parts)


def main() -> int:
    """Run the paths of the command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="paths whose operator or implementation holds this text")
    parser.add_argument("--ours", action="store_true", help="this package's kernels only")
    parser.add_argument("--racecheck", action="store_true", help="--ours, with hand-overs that racecheck can follow")
    parser.add_argument("--with-jit", action="store_true", help="FlashInfer's kernels as well, which it builds first")
    parser.add_argument(
        "--part", default="1/1", help="I/N: every Nth path, beginning with the Ith, for N processes side by side"
    )
    parser.add_argument("--filter", action="store_true", help="print our kernels as compute-sanitizer's --kernel-name")
    asked = parser.parse_args()
    if asked.filter:
        print(",".join(f"kne={name}" for name in kernel_names()))
        return 0
    device, wrong = torch.device("cuda", 0), 0
    cuda_sparse_mla.LANES_ARRIVE = asked.racecheck
    first, step = part(asked.part)
    all_paths = paths(device, ours=asked.ours or asked.racecheck, with_jit=asked.with_jit)
    chosen = [(case, name) for case, name in all_paths if asked.only in f"{case.operator} {name}"][first::step]
    with torch.inference_mode():
        for case, name in chosen:
            begun = time.perf_counter()
            try:
                share = case.share(device, name)
                torch.cuda.synchronize()
            except Exception as error:
                share, verdict = float("inf"), f"{type(error).__name__}: {str(error)[:300]}"
            else:
                verdict = f"error {share:.2g} of the bound"
            wrong += not share <= 1
            took = time.perf_counter() - begun
            state = "ok   " if share <= 1 else "WRONG"
            print(f"{state} {case.operator} {name} {case.label}: {verdict}, {took:.1f} s", flush=True)
    print(f"{len(chosen)} paths, {wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
