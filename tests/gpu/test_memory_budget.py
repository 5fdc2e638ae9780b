"""Scores and selection of long prompts keep to their budget of memory, and what it is changes no pick.

The case: 8 requests with 50,000 cached tokens and 500 new ones each, 4000 rows whose scores would take 800 MB at once.
Alive at the peak are the scores of a group of rows (50,560 columns, 197.5 KiB a row), the selection's candidate lists
(32 KiB each) and the picks. With 32 MiB on 132 processors: 128 rows, 24.7 MiB, and 160 lists, 5 MiB, those of the last
32 rows, which 4 programs each walk and join in one more. The picks, 31.25 MiB, are the result and come on top.
With this package's own kernels; DeepGEMM's scores in the same case are in test_vendor_index.py.
"""

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import INDEX_PAGE_BYTES, PAGE_SIZE
from sglang_dsa_plugin.ops import index_select
from sglang_dsa_plugin.tools.bench_timing import peak_of

REQUESTS, CACHED, NEW, HEADS, K = 8, 50_000, 500, 64, 2048
MB = 1 << 20
BUDGET = "SGLANG_DSA_PLUGIN_SCORES_MB"
# Lengths, tickets and the like: a few words a row.
SMALL = 2 * MB


def batch(requests, cached, new, device, heads=HEADS):
    """(q, pages, gate, lengths, page_table, row_to_request) of `requests` prompts in chunked prefill."""
    rows, pages = requests * new, -(-(cached + new) // PAGE_SIZE)
    g = torch.Generator(device).manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=device)

    keys = normal(requests * pages, PAGE_SIZE * 128).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(requests * pages, PAGE_SIZE, generator=g, device=device) + 0.5).view(torch.uint8)
    store = torch.cat([keys, scales], dim=1)
    assert store.shape[1] == INDEX_PAGE_BYTES
    owner = torch.arange(requests, dtype=torch.int32, device=device)
    lengths = cached + 1 + torch.arange(new, dtype=torch.int32, device=device)
    table = torch.randperm(requests * pages, generator=g, device=device).int().view(requests, pages)
    q = normal(rows, heads, 128).to(torch.float8_e4m3fn)
    return q, store, normal(rows, heads), lengths.repeat(requests), table, owner.repeat_interleave(new)


def picks_of(*arguments, **options):
    return index_select.paged(*arguments, **options, impl="triton")


@pytest.fixture(scope="module")
def inputs():
    return batch(REQUESTS, CACHED, NEW, "cuda")


@pytest.fixture(scope="module")
def unsplit(inputs):
    """All scores at once: the picks, and that it would really take more than the largest budget tried."""
    picks, most = peak_of(lambda: picks_of(*inputs, K, budget_bytes=4 << 30))
    assert most > 768 * MB
    return picks


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [8, 32, 128, 512])
def test_peak_stays_under_the_budget_and_picks_are_those_of_the_unsplit_call(inputs, unsplit, budget, monkeypatch):
    monkeypatch.setenv(BUDGET, str(budget))
    picks, most = peak_of(lambda: picks_of(*inputs, K))
    assert torch.equal(picks, unsplit)
    assert most <= budget * MB + picks.nbytes + SMALL, f"{most / MB:.1f} MiB extra"


@pytest.mark.gpu
def test_the_default_budget_is_512_mb(inputs, unsplit, monkeypatch):
    monkeypatch.delenv(BUDGET, raising=False)
    picks, most = peak_of(lambda: picks_of(*inputs, K))
    assert torch.equal(picks, unsplit)
    assert 256 * MB < most <= 512 * MB + picks.nbytes + SMALL, f"{most / MB:.1f} MiB extra"


@pytest.mark.gpu
def test_a_row_longer_than_the_budget(monkeypatch):
    """One row of a million keys takes 4 MB of scores: with 1 MB it is scored in stretches."""
    given = batch(1, 1_000_000, 4, "cuda")
    whole, _ = peak_of(lambda: picks_of(*given, K, budget_bytes=4 << 30))
    monkeypatch.setenv(BUDGET, "1")
    picks, most = peak_of(lambda: picks_of(*given, K))
    assert torch.equal(picks, whole)
    # Positions and the selection's own lists come on top of a budget that small.
    assert most <= 16 * MB, f"{most / MB:.1f} MiB extra"


@pytest.mark.gpu
def test_peak_does_not_depend_on_the_number_of_requests(monkeypatch):
    monkeypatch.setenv(BUDGET, "64")
    one, many = (batch(requests, CACHED, 1000 // requests, "cuda") for requests in (1, 10))
    (_, of_one), (_, of_many) = (peak_of(lambda given=given: picks_of(*given, K)) for given in (one, many))
    assert abs(of_one - of_many) <= SMALL, (of_one / MB, of_many / MB)


def test_the_case_in_small_on_a_cpu(monkeypatch):
    given = batch(3, 300, 5, "cpu", heads=16)
    want = index_select.reference_paged(*given, 64)
    monkeypatch.setenv(BUDGET, "1")
    picks = index_select.paged(*given, 64)
    # Near ties aside, which rounding decides.
    assert sum(int(torch.isin(a, b).sum()) for a, b in zip(picks, want)) >= 0.99 * want.numel()
