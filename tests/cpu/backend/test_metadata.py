"""Step metadata against a loop over requests, with odd sizes, empty requests and padding."""

import pytest
import torch

from sglang_dsa_plugin.backend import metadata
from sglang_dsa_plugin.backend.dense_fallback import IN_GRAPH, SPARSE_DECODE, Decision

DENSE = Decision("dense", "test")


def token_table(context: int, requests: int, seed: int = 0) -> torch.Tensor:
    """req_to_token [requests, context]: pages in random order, slots of a page consecutive; page 0 is padding."""
    pages = -(-context // 64)
    order = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(seed)) + 1
    table = order.view(requests, pages, 1) * 64 + torch.arange(64)
    return table.reshape(requests, pages * 64)[:, :context].to(torch.int32)


def test_decode_rows_see_all_of_their_request():
    table = token_table(300, 5)
    requests, lengths = torch.tensor([3, 0, 4]), torch.tensor([1, 64, 130])
    step = metadata.decode_step(table, requests, lengths, 130, SPARSE_DECODE)
    assert step.lengths.tolist() == [1, 64, 130]
    assert step.row_to_request.tolist() == [0, 1, 2]
    assert step.page_table.dtype == torch.int32 and step.page_table.shape == (3, 3)
    for b, request in enumerate(requests.tolist()):
        assert step.page_table[b].tolist() == [table[request, 64 * i].item() // 64 for i in range(3)]


@pytest.mark.parametrize("padding", [0, 3])
def test_extend_rows_of_a_mixed_batch(padding):
    # Prefixes and extensions that share no offset; one request adds nothing.
    table = token_table(3100, 4)
    requests = torch.tensor([2, 0, 3, 1])
    prefix, extend = torch.tensor([0, 130, 3000, 7]), torch.tensor([5, 64, 1, 0])
    rows = int(extend.sum()) + padding
    step = metadata.extend_step(table, requests, prefix, extend, rows, 3001, DENSE)
    lengths, owner = [], []
    for b in range(4):
        for i in range(int(extend[b])):
            lengths.append(int(prefix[b]) + i + 1)
            owner.append(b)
    assert step.lengths.tolist() == lengths + [0] * padding
    assert step.row_to_request.tolist() == owner + [0] * padding
    assert step.cu_queries.tolist() == [0, 5, 69, 70, 70]
    assert step.cu_keys.tolist() == [0, 5, 199, 3200, 3207]
    slots = [table[requests[b], j].item() for b in range(4) for j in range(int(prefix[b] + extend[b]))]
    assert step.key_slots.tolist() == slots


def test_masked_steps_carry_the_lengths_of_dense_ones():
    arguments = token_table(64, 1), torch.tensor([0]), torch.tensor([3]), torch.tensor([4]), 4, 7
    step = metadata.extend_step(*arguments, Decision("masked", "test"))
    assert step.cu_queries.tolist() == [0, 4] and step.cu_keys.tolist() == [0, 7] and len(step.key_slots) == 7
    assert step.picks is None


def test_sparse_steps_carry_no_dense_lengths():
    step = metadata.extend_step(
        token_table(64, 1), torch.tensor([0]), torch.tensor([0]), torch.tensor([4]), 4, 4, Decision("sparse", "test")
    )
    assert step.cu_queries is None and step.cu_keys is None and step.key_slots is None


@pytest.mark.parametrize("told", [True, False])
def test_nothing_is_looked_up_where_nothing_is_cached(told):
    arguments = token_table(64, 2), torch.tensor([1, 0]), torch.tensor([0, 0]), torch.tensor([4, 3]), 7, 4, DENSE
    step = metadata.extend_step(*arguments, **({"new_tokens": 7, "cached_tokens": 0} if told else {}))
    assert step.key_slots is None and step.cu_keys.tolist() == [0, 4, 7]


def test_too_few_rows_are_refused():
    table = token_table(64, 1)
    with pytest.raises(ValueError, match="at least the 5 new tokens"):
        metadata.extend_step(table, torch.tensor([0]), torch.tensor([0]), torch.tensor([5]), 4, 5, DENSE)


def test_slots_follow_the_page_table_and_are_kept_for_layers_that_reuse_picks():
    table = token_table(200, 2)
    step = metadata.decode_step(table, torch.tensor([1, 0]), torch.tensor([200, 70]), 200, SPARSE_DECODE)
    picks = torch.tensor([[0, 63, 64, 199], [5, 69, -1, -1]], dtype=torch.int32)
    slots = step.slots_of(picks)
    assert slots.tolist() == [
        [table[1, p].item() for p in (0, 63, 64, 199)],
        [table[0, 5].item(), table[0, 69].item(), -1, -1],
    ]
    assert step.slots_of(picks) is slots
    other = picks.clone()
    other[0, 0] = 7
    assert step.slots_of(other)[0, 0] == table[1, 7]


def test_slots_that_came_with_their_picks_are_not_translated_again():
    step = metadata.decode_step(token_table(200, 2), torch.tensor([1, 0]), torch.tensor([200, 70]), 200, SPARSE_DECODE)
    picks = torch.tensor([[0, 63], [5, -1]], dtype=torch.int32)
    want, own = step.slots_of(picks), torch.zeros(2, 2, dtype=torch.int32)
    step.keep_slots(picks, own)
    assert step.slots_of(picks) is own
    # Equal picks in another tensor may be those of another rank.
    assert torch.equal(step.slots_of(picks.clone()), want)


@pytest.mark.parametrize("k", [200, 256])
def test_rows_that_see_at_most_k_tokens_pick_all_of_them(k):
    table = token_table(200, 3)
    lengths = torch.tensor([200, 0, 70])
    step = metadata.decode_step(table, torch.tensor([1, 2, 0]), lengths, 200, SPARSE_DECODE)
    picks = step.every_token(k)
    for row, length in enumerate(lengths.tolist()):
        assert picks[row].tolist() == [*range(length)] + [-1] * (k - length)
    assert step.every_token(k) is picks
    slots = step.slots_of(picks)
    assert slots[0, :200].tolist() == table[1].tolist()
    assert slots[2, :70].tolist() == table[0, :70].tolist()
    assert (slots[1] == -1).all() and (slots[2, 70:] == -1).all()
    # One token past k: scores decide.
    assert step.every_token(199) is None


def test_picks_of_another_layer_in_the_same_memory_are_translated_anew():
    """A prefill graph gives the memory of one layer's picks to the next; nobody holds it."""
    step = metadata.extend_step(
        torch.arange(512).view(2, 256), torch.tensor([0, 1]), torch.tensor([150, 70]), torch.tensor([3, 1]), 4, 153,
        IN_GRAPH,
    )  # fmt: skip
    memory = torch.empty(6, 64, dtype=torch.int32)
    for layer in range(2):
        found = (torch.arange(64) + 3 * layer).repeat(4, 1).int()
        memory[:4].copy_(found)
        step.picks_moved(found, memory[:4])
        assert step.slots_of(memory[:4])[0].tolist() == found[0].tolist()
        assert step.slots_of(memory[:4])[3].tolist() == (found[3] + 256).tolist()
    slots = torch.full((4, 64), 7, dtype=torch.int32)
    step.keep_slots(found, slots)
    step.picks_moved(found, memory[:4])
    assert step.slots_of(memory[:4]) is slots
