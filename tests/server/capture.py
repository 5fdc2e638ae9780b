"""Holds what a running server computed, layer by layer, against fp64 on the same inputs.

The server runs with capture_probe/ on its PYTHONPATH, which writes calls of attention and selection while a switch is
on. Here they are read back and judged:

- attention: output and lse within the bounds of docs/operators.md; the slots it read are the picks' own;
- scores: within what the products of their dtype allow;
- picks: bit for bit the exact set of the scores that the server's own kernel gives, and how many of them are in the
  exact set of the fp64 scores (recall; the rest are near ties).
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, PAGE_SIZE
from sglang_dsa_plugin.ops import dense_mha, select, sparse_mla
from sglang_dsa_plugin.tools.check_judges import ROUNDS_WEIGHTS, spread_of
from tests.cpu.ops.bounds import assert_attention
from tests.server.harness import Server, random_prompt

PROBE = str(Path(__file__).parent / "capture_probe")
# Error of a score relative to the sum of its terms' sizes. Hopper adds fp8 products in 14 bits or so.
SCORE_BOUND = {True: 2**-10, False: 2**-18}
# Pages of few keys, in rows, for which fp64 scores are computed at once.
_KEYS_AT_ONCE = 1 << 14


def environment(directory: Path) -> tuple[tuple[str, str], ...]:
    """What a server needs in its environment to write its calls to `directory`."""
    return (("PYTHONPATH", PROBE), ("DSA_TEST_CAPTURE", str(directory)))


def directory_of(server: Server) -> Path:
    """Where a server writes its calls."""
    return Path(dict(server.spec.env)["DSA_TEST_CAPTURE"])


@contextlib.contextmanager
def capturing(directory: Path) -> Iterator[None]:
    """Calls within the block are written; those of earlier blocks are forgotten."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.pt"):
        old.unlink()
    (directory / "on").touch()
    try:
        yield
    finally:
        (directory / "on").unlink()


def drive(server: Server, k: int, longest: int, new: int = 3) -> None:
    """Prompts around k and one of `longest` tokens at once, then one that continues the longest from the cache, then
    one alone, past k where k is small, that a prefill graph holds if there are graphs.
    """
    prompts = [random_prompt(length, seed=60) for length in (k // 2, k, k + 1, longest)]
    _ask(server, prompts, new)
    _ask(server, [prompts[-1] + random_prompt(10, seed=61)], new)
    _ask(server, [random_prompt(min(2000, 3 * k), seed=62)], new)


def _ask(server: Server, prompts: Sequence[Sequence[int]], new: int) -> None:
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    reply = server.http.post("/generate", json={"input_ids": [list(p) for p in prompts], "sampling_params": sampling})
    assert reply.status_code == 200, reply.text[:2000]


@dataclass
class Report:
    """What was judged. calls: (operator, mode) -> layer -> calls. recall: share of the exact picks that were picked;
    lowest: of the row with the fewest. chosen: implementations seen. score_error: largest, as a share of its bound.
    """

    calls: dict[tuple[str, str], dict[int, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    chosen: set[str] = field(default_factory=set)
    rows: int = 0
    picked: int = 0
    exact: int = 0
    lowest: float = 1.0
    score_error: float = 0.0

    @property
    def recall(self) -> float:
        return self.picked / max(1, self.exact)

    def text(self) -> str:
        """One line for the test report."""
        calls = ", ".join(
            f"{operator}/{mode}: {sum(layers.values())} in layers {sorted(layers)}"
            for (operator, mode), layers in sorted(self.calls.items())
        )
        return (
            f"recall {self.recall:.6f} of {self.exact} picks, lowest row {self.lowest:.4f}; score error "
            f"{self.score_error:.2g} of its bound; {self.rows} rows; {', '.join(sorted(self.chosen))}; {calls}"
        )


def judge(directory: Path) -> Report:
    """Judge every captured call; AssertionError for the first that is wrong, naming operator, mode, layer and file."""
    # The server rests by now, while for the other tests it needs the cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, (os.cpu_count() or 2) // 2))
    try:
        return _judge_all(directory)
    finally:
        torch.set_num_threads(threads)


def _judge_all(directory: Path) -> Report:
    report = Report()
    judges = {"sparse_mla": _judge_sparse, "dense_mha": _judge_dense, "paged": _judge_picks}
    for path in sorted(directory.glob("*.pt")):
        call = torch.load(path, weights_only=True)
        operator = call["operator"]
        try:
            judges[operator](call, report)
        except AssertionError as error:
            raise AssertionError(
                f"{operator} by {call['implementation']}, {call['mode']}, layer {call['layer']}, {call['rows']} rows, "
                f"{path.name}: {error}"
            ) from error
        report.calls[operator, call["mode"]][call["layer"]] += 1
        report.chosen.add(f"{operator}={call['implementation']}")
    return report


def _judge_sparse(call: dict[str, Any], report: Report) -> None:
    slots, own = call["slots"], torch.arange(len(call["picks"]))
    # The slots are those of the picks, and the picks of a row begin with all that it has.
    of_picks = select.reference_slots(call["picks"], call["page_table"], own)
    width = slots.shape[1]
    assert torch.equal(call["pool_slots"].int(), of_picks[:, :width]), "slots are not those of the picks"
    assert (call["picks"][:, width:] == -1).all(), "picks past the slots"
    assert (call["picks"] < call["seen"].unsqueeze(1)).all(), "a row picked what it must not see"
    valid = slots >= 0
    assert torch.equal(valid, of_picks[:, :width] >= 0), "a picked slot lies outside the cache"
    first = torch.arange(width) < call["seen"].clamp(max=call["picks"].shape[1]).unsqueeze(1)
    assert torch.equal(valid, first), "number of picks, which come first: the layer promises it to the kernels"
    arguments = (call["q"], call["kv_rows"], slots, call["scale"], call["layout"], call["kv_scale"])
    want = sparse_mla.reference(*arguments, call["sink"], call["lengths"])
    # All but FlashMLA's kernels get the sink when their output has been rounded already.
    rounded = 1 if call["sink"] is None or call["implementation"] in ("flash_mla", "flash_mla_kv") else 2
    spread = None
    if call["implementation"] in ROUNDS_WEIGHTS:
        spread = spread_of(call["q"], call["kv_rows"], slots, call["scale"], call["layout"], call["kv_scale"])
    assert_attention((call["out"], call["lse"]), want, spread=spread, rounded=rounded)
    report.rows += len(slots)


def _judge_dense(call: dict[str, Any], report: Report) -> None:
    q, k, v, cu_q, cu_k, scale = (call[name] for name in ("q", "k", "v", "cu_q", "cu_k", "scale"))
    spread = None
    if call["implementation"] in ROUNDS_WEIGHTS:
        spread, _ = dense_mha.reference(q, k, v.abs(), cu_q, cu_k, scale)
    want = dense_mha.reference(q, k, v, cu_q, cu_k, scale)
    assert_attention((call["out"], call["lse"]), want, spread=spread)
    report.rows += q.shape[0]


def _judge_picks(call: dict[str, Any], report: Report) -> None:
    lengths, topk = call["lengths"], call["topk"]
    forced = (call["init_tokens"], call["local_tokens"])
    fp8 = call["pages"].dtype == torch.uint8
    scores, want, size = call["scores"], *_scores(call)
    # One is as wide as the longest row of the call, the other as the pages of the kept rows; both hold every window.
    width = min(scores.shape[1], want.shape[1])
    scores, want, size = scores[:, :width], want[:, :width], size[:, :width]
    # Rows that keep everything are scored by no one in selection, and their queries may be anything.
    inside = (torch.arange(width) < lengths.unsqueeze(1)) & (lengths > topk).unsqueeze(1)
    error = (scores.double() - want).abs()
    share = torch.where(inside, error / size.clamp_min(1e-30), 0) / SCORE_BOUND[fp8]
    report.score_error = max(report.score_error, float(share.max()))
    assert share.max() <= 1, f"scores are off by {float(share.max()):.2g} of their bound"
    exact_of_own = select.reference(scores, lengths, topk, None, *forced)
    assert torch.equal(call["picks"], exact_of_own), "picks are not the exact set of the kernel's own scores"
    exact = select.reference(want, lengths, topk, None, *forced)
    for row, best, length in zip(call["picks"], exact, lengths.tolist()):
        if length <= topk:
            continue
        both = int(torch.isin(best, row).sum())
        report.picked, report.exact = report.picked + both, report.exact + len(best)
        report.lowest = min(report.lowest, both / len(best))


def _scores(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, sum of the sizes of their terms), fp64 [R, pages * 64]: the formula of ops/index_scores.py."""
    pages, table = call["pages"], call["page_table"].long()
    keys, scale = pages.reshape(-1, INDEX_DIM), None
    if pages.dtype == torch.uint8:
        keys = pages[:, : PAGE_SIZE * INDEX_DIM].contiguous().view(FP8).reshape(-1, INDEX_DIM)
        scale = pages[:, PAGE_SIZE * INDEX_DIM :].contiguous().view(torch.float32).reshape(-1).double()
    places = (table.unsqueeze(2) * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten(1)
    scores, sizes = [], []
    for q, gate, at in zip(call["q"].double(), call["gate"].double(), places):
        parts = [keys[part].double() for part in at.split(_KEYS_AT_ONCE)]
        row = torch.cat([gate @ (q @ part.T).relu() for part in parts])
        size = torch.cat([gate.abs() @ (q.abs() @ part.abs().T) for part in parts])
        scores.append(row if scale is None else row * scale[at])
        sizes.append(size if scale is None else size * scale[at])
    return torch.stack(scores), torch.stack(sizes)
