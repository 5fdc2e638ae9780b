"""Measured choices in the support table: asked for a shape on this GPU, taken where they can run, never by force."""

import pytest
import torch

from sglang_dsa_plugin import support, support_row, tuned


@pytest.fixture(autouse=True)
def forget():
    """Choices are kept; those of a test must not outlive it."""
    yield
    support._choose.cache_clear()
    support._measured.cache_clear()


def test_a_measured_choice_comes_first_where_it_can_run(monkeypatch):
    features = {"device": "cuda", "sm": 90, "layout": "bf16_1152", "heads": 16, "k": 2048, "dtype": torch.bfloat16}
    asked = []

    def preferred(*arguments):
        asked.append(arguments)
        return "flash_mla", "NVIDIA H200"

    monkeypatch.setattr(tuned, "preferred", preferred)
    monkeypatch.setattr(support_row, "unusable", lambda package: None if package == "flash_mla" else "not here")
    support._choose.cache_clear()
    support._measured.cache_clear()
    choice = support.choose("sparse_mla", rows=20, **features)
    assert choice.name == "flash_mla" and "NVIDIA H200" in choice.reason
    assert asked == [("sparse_mla", 90, None, "bf16_1152", 16, 16)]
    assert support.choose("sparse_mla", rows=20, packages="none", **features).name == "triton"
    assert support.choose("sparse_mla", rows=20, packages="all", **features).name == "cuda"
    assert support.choose("sparse_mla", rows=20, impl="triton", **features).name == "triton"
    # What the table names and cannot run, it does not get.
    monkeypatch.setattr(tuned, "preferred", lambda *_: ("fa3", "NVIDIA H200"))
    assert support.choose("sparse_mla", rows=20, **features).name == "triton"
    monkeypatch.setattr(tuned, "preferred", lambda *_: None)
    assert support.choose("sparse_mla", rows=20, **features).name == "triton"
