"""What a launch of the CUDA C++ selection is held to: positions and slots, both bit for bit."""

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import select as cuda_select
from sglang_dsa_plugin.ops import select
from tests.cpu.ops import selection_inputs
from tests.gpu import selection_checks

K = 2048


def generator(seed=0):
    return torch.Generator("cuda").manual_seed(seed)


def ints(low, high, *shape, seed=0):
    return torch.randint(low, high, shape, device="cuda", generator=generator(seed), dtype=torch.int32)


def lengths_of(width, rows, k=K):
    """All, all but one, k + 1, k, none, one, and others."""
    lengths = ints(0, width + 1, rows, seed=rows)
    first = torch.tensor([width, width - 1, k + 1, k, 0, 1], device="cuda").clamp(0, width)
    lengths[: len(first)] = first[:rows]
    return lengths


def launched(monkeypatch):
    """Fails where the Triton kernels are taken instead."""

    def instead(*_given, **_more):
        pytest.fail("the selection went to Triton")

    monkeypatch.setattr(cuda_select.triton_select, "select_rows", instead)


def assert_picks(scores, lengths, k=K, starts=None, forced=(0, 0), offsets=None, shape=None, repeats=1):
    """Positions and slots of one launch, both as they should be."""
    rows, width = scores.shape
    table = ints(0, 99999, 3, width // 64 + 1, seed=width)
    owner = torch.arange(rows, device="cuda") % 3
    if starts is None and forced == (0, 0):
        want = selection_checks.by_sorting(scores, lengths, k)
    else:
        want = select.topk(scores, lengths, k, starts, *forced, impl="torch")
    slots = select.positions_to_slots(want, table, owner, impl="torch")
    moved = want if offsets is None else torch.where(want >= 0, want + offsets.unsqueeze(1), -1).int()
    for _ in range(repeats):
        beside = torch.full_like(want, 7)
        got = cuda_select.select_rows(
            scores,
            lengths,
            k,
            starts,
            *forced,
            slots=(table, owner, 64),
            offsets=offsets,
            slots_out=beside,
            shape=shape,
        )
        assert torch.equal(got, moved)
        assert torch.equal(beside, slots)


def assert_graph_follows(rows):
    """Replays of one captured launch follow lengths and scores that are written into its inputs."""
    width = 131072
    scores, lengths = torch.zeros(rows, width, device="cuda"), lengths_of(width, rows)
    table, owner = ints(0, 99999, rows, width // 64), torch.arange(rows, device="cuda")
    beside = torch.empty(rows, K, dtype=torch.int32, device="cuda")

    def step():
        return cuda_select.select_rows(scores, lengths, K, None, 0, 0, slots=(table, owner, 64), slots_out=beside)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        picks = step()
    for length in (131072, 131071, 32768, 8192, 4096, 2049, 2048, 5, 0):
        for kind in ("sum of relus", "five values"):
            scores.copy_(selection_inputs.scores(kind, rows, width, generator(length)))
            lengths.fill_(length)
            lengths[rows // 2 :] -= min(length, 1)
            graph.replay()
            want = selection_checks.by_sorting(scores, lengths, K)
            assert torch.equal(picks, want)
            assert torch.equal(beside, select.positions_to_slots(want, table, owner, impl="torch"))


def assert_windows(init, local, dtype, shape_of=None):
    """Windows that begin anywhere in a group of four, forced tokens and offsets. shape_of: columns -> the launch."""
    width, rows = 13000, 9
    shape = None if shape_of is None else shape_of(width + 3)
    starts = ints(0, 900, rows, seed=1)
    lengths = torch.minimum(lengths_of(width, rows), width - starts).to(dtype)
    offsets = ints(0, 10**6, rows).to(dtype)
    for kind in ("thousands of values", "all equal", "mostly NaN", "any bits"):
        whole = selection_inputs.scores(kind, rows, width + 40, generator(init))
        for first in (0, 1, 2, 3):
            scores = whole[:, first : first + width]
            assert_picks(scores, lengths, K, starts.to(dtype), (init, local), offsets, shape=shape)
            assert_picks(scores, lengths, K, None, (init, local), shape=shape)
