"""A step in memory that a CUDA graph reads: what is filled in, what of an earlier batch is left, what is refused."""

import pytest
import torch

from sglang_dsa_plugin.backend import metadata
from sglang_dsa_plugin.backend.dense_fallback import WHOLE_DENSE, WHOLE_GRAPH, WHOLE_SCORED
from sglang_dsa_plugin.backend.held_step import HeldRequests, HeldRows, HeldScored

K, ROWS = 70, 12
# Three requests of up to 128 tokens in pages of 64, the second page of each far from its first.
TABLE = torch.stack([torch.cat((torch.arange(64) + 64 * (r + 1), torch.arange(64) + 64 * (r + 7))) for r in range(3)])


def planned(prefix, extend, rows):
    step = metadata.extend_step(
        TABLE.int(),
        torch.arange(len(prefix)),
        torch.tensor(prefix),
        torch.tensor(extend),
        rows,
        max(p + e for p, e in zip(prefix, extend)),
        WHOLE_GRAPH,
        new_tokens=sum(extend),
    )
    slots = torch.cat([TABLE[r, p : p + e] for r, (p, e) in enumerate(zip(prefix, extend))])
    return step, slots


def assert_holds(step, prefix, extend):
    real = sum(extend)
    seen = [p + i + 1 for p, e in zip(prefix, extend) for i in range(e)]
    owner = [r for r, e in enumerate(extend) for _ in range(e)]
    assert step.lengths.tolist() == seen + [0] * (step.rows - real)
    for row, (length, request) in enumerate(zip(seen, owner)):
        assert step.every_token(K)[row].tolist() == list(range(length)) + [-1] * (K - length)
        slots = step.slots_of(step.every_token(K))[row]
        assert slots.tolist() == TABLE[request, :length].tolist() + [-1] * (K - length)
    assert (step.every_token(K)[real:] == -1).all() and (step.slots_of(step.every_token(K))[real:] == -1).all()
    assert step.store_slots[real:].eq(0).all()
    assert step.pick_counts(K).tolist() == step.lengths.tolist()


def test_a_step_reads_what_was_filled_in_last_and_nothing_of_a_larger_batch_before():
    held = HeldRows.make(ROWS, K, torch.device("cpu"))
    recorded = held.step(10)
    assert recorded.rows == 10 and not recorded.decision.expanded and recorded.decision.path == "whole"
    for prefix, extend in (([64, 3, 0], [6, 2, 2]), ([0, 60], [1, 3]), ([0], [10])):
        step, slots = planned(prefix, extend, 10)
        held.fill(step, slots)
        assert_holds(recorded, prefix, extend)
        assert recorded.store_slots[: sum(extend)].tolist() == slots.tolist()
    # The graphs of all sizes read the same memory.
    assert held.step(4).slots_of(held.step(4).every_token(K)).data_ptr() == held.slots.data_ptr()


def test_a_row_that_does_not_keep_every_token_is_refused():
    held = HeldRows.make(ROWS, K, torch.device("cpu"))
    step, slots = planned([64], [7], 8)
    with pytest.raises(ValueError, match="at most 70 tokens"):
        held.fill(step, slots)


def test_requests_and_their_padding_read_what_was_filled_in_last():
    held = HeldRequests.make(ROWS, 3, torch.device("cpu"))
    recorded = held.step(10)
    assert recorded.rows == 10 and recorded.decision is WHOLE_DENSE and recorded.decision.expanded
    for extend, borders in (([4, 1, 2], [0, 4, 5, 7, 10]), ([10], [0, 10, 10, 10, 10]), ([1, 3], [0, 1, 4, 10, 10])):
        slots = torch.arange(64, 64 + sum(extend))
        held.fill(torch.tensor(extend), slots, 10)
        assert recorded.cu_queries.tolist() == recorded.cu_keys.tolist() == borders
        assert recorded.store_slots.tolist() == slots.tolist() + [0] * (10 - sum(extend))


@pytest.mark.parametrize(("extend", "rows"), [([1, 1, 1, 1], 8), ([9], 8), ([3], ROWS + 1)])
def test_more_requests_or_rows_than_there_is_memory_for_are_refused(extend, rows):
    held = HeldRequests.make(ROWS, 3, torch.device("cpu"))
    with pytest.raises(ValueError, match="up to 3 requests and 12 rows"):
        held.fill(torch.tensor(extend), torch.arange(sum(extend)), rows)


def test_rows_that_are_scored_read_the_lengths_and_pages_that_were_filled_in_last():
    held = HeldScored.make(ROWS, 2, torch.device("cpu"))
    recorded = held.step(10)
    assert recorded.decision is WHOLE_SCORED and not recorded.decision.expanded and recorded.captured
    # The host knows no lengths, so nothing is taken to be short.
    assert recorded.every_token(K) is None
    for prefix, extend in (([64, 3, 0], [6, 2, 2]), ([100, 0], [9, 1]), ([3], [2])):
        step, slots = planned(prefix, extend, 10)
        held.fill(step, slots)
        seen = [p + i + 1 for p, e in zip(prefix, extend) for i in range(e)]
        owner = [r for r, e in enumerate(extend) for _ in range(e)]
        assert recorded.lengths.tolist() == seen + [0] * (10 - len(seen))
        assert recorded.store_slots.tolist() == slots.tolist() + [0] * (10 - len(seen))
        for row, (length, request) in enumerate(zip(seen, owner)):
            positions = torch.arange(length, dtype=torch.int32).view(1, -1)
            pages = recorded.page_table[recorded.row_to_request.long()[row]]
            found = pages[positions[0] // 64] * 64 + positions[0] % 64
            assert found.tolist() == TABLE[request, :length].tolist()
    # What layers make of it belongs to one run of the model.
    assert held.step(10) is not recorded and held.step(10)._counts is None


@pytest.mark.parametrize(("rows", "longest"), [(ROWS + 1, 64), (4, 65)])
def test_more_rows_or_pages_than_there_is_memory_for_are_refused(rows, longest):
    held = HeldScored.make(ROWS, 1, torch.device("cpu"))
    step, slots = planned([longest - 2], [2], rows)
    with pytest.raises(ValueError, match="12 rows of 1 pages"):
        held.fill(step, slots)
