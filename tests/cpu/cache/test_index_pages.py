"""The index-key cache of a pool: who owns pages, whole tokens move, host copies come back bit for bit."""

import pytest
import torch

from sglang_dsa_plugin.cache.index_pages import IndexPages, pages_for
from sglang_dsa_plugin.cache.layouts import FP8, index_token_bytes
from sglang_dsa_plugin.ops import quant

DTYPES = [FP8, torch.bfloat16, torch.float32]


def filled(dtype: torch.dtype, pages: int = 4, owns: tuple[bool, ...] = (True, False, True)) -> IndexPages:
    cache = IndexPages(pages, owns, dtype, "cpu")
    slots = torch.arange(pages * 64)
    for layer in (0, 2):
        keys = torch.randn(pages * 64, 128, generator=torch.Generator().manual_seed(layer))
        cache.store(layer, slots, *(quant.quantize_keys(keys) if dtype == FP8 else (keys.to(dtype), None)))
    return cache


def token(cache: IndexPages, layer: int, slot: int) -> tuple[bytes, float | None]:
    keys, scales = cache.load(layer, torch.tensor([slot]))
    return bytes(keys.contiguous().view(torch.uint8).flatten().tolist()), None if scales is None else scales.item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_the_layers_that_own_pages(dtype):
    cache = IndexPages(5, (True, False, True), dtype, "cpu")
    assert sum(pages.nbytes for pages in cache.buffer) == 2 * 5 * 64 * index_token_bytes(dtype)
    assert cache.buffer[1].shape[0] == 0


def test_index_share_schedule_allocates_21_of_78_layers():
    # Layers that reuse picks hold no keys; GLM-5.2 has 21 full layers of 78.
    owns = [i < 3 or (i - 2) % 4 == 0 for i in range(78)]
    cache = IndexPages(1, owns, FP8, "cpu")
    assert sum(pages.shape[0] > 0 for pages in cache.buffer) == 21


@pytest.mark.parametrize("dtype", DTYPES)
def test_move_takes_whole_tokens_and_leaves_the_neighbours(dtype):
    # Slot 70 to slot 5 moves key and scale of one token only, in every layer that owns pages.
    cache = filled(dtype)
    before = {(layer, s): token(cache, layer, s) for layer in (0, 2) for s in range(256)}
    cache.move(torch.tensor([5]), torch.tensor([70]))
    for layer in (0, 2):
        for s in range(256):
            assert token(cache, layer, s) == before[layer, 70 if s == 5 else s]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [7, 8192])
def test_host_copy_returns_to_other_slots(dtype, chunk, monkeypatch):
    monkeypatch.setattr("sglang_dsa_plugin.cache.index_pages.HOST_COPY_TOKENS", chunk)
    cache = filled(dtype)
    source, target = torch.arange(64, 94), torch.arange(130, 160)
    before = [token(cache, 2, int(s)) for s in source]
    host = cache.to_host(source)
    cache.store(2, source, *(torch.zeros(30, 128).to(dtype), torch.zeros(30) if dtype == FP8 else None))
    cache.from_host(host, target)
    assert [token(cache, 2, int(s)) for s in target] == before


def test_host_copy_of_another_length_is_refused(monkeypatch):
    monkeypatch.setattr("sglang_dsa_plugin.cache.index_pages.HOST_COPY_TOKENS", 8)
    cache = filled(FP8)
    with pytest.raises(ValueError, match="host copy of layer 0 has 2 chunks, the slots make 3"):
        cache.from_host(cache.to_host(torch.arange(16)), torch.arange(20))


def test_one_page_more_than_the_tokens_need():
    assert pages_for(64) == 2 and pages_for(6400) == 101
