"""FlashInfer's top-k behind the operator contract. It builds a C++ module at the first call, which takes minutes, so a
run that has none to spare leaves this file out: --ignore tests/gpu/test_flashinfer_topk.py.
"""

import pytest

from tests.gpu import selection_checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width", selection_checks.WIDTHS)
@pytest.mark.parametrize("k", [64, 2048])
def test_selection_without_ties(k, width):
    selection_checks.without_ties("flashinfer", k, width)


@pytest.mark.parametrize("k", [64, 2048])
@pytest.mark.parametrize("kind", selection_checks.TIES)
def test_selection_with_ties_is_a_right_one(k, kind):
    selection_checks.with_ties("flashinfer", k, kind)


def test_slots_and_offsets():
    selection_checks.slots_and_offsets("flashinfer")


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("impl", ["flashinfer", "deep_gemm_flashinfer"])
def test_picks_in_a_cuda_graph_as_eagerly(impl, rows):
    selection_checks.in_a_graph(impl, rows)
