"""Measured choices in the support table: asked for a shape on this GPU, taken where they can run, never by force."""

import json

import pytest
import torch

from sglang_dsa_plugin import plan, support, support_row, tuned


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


@pytest.fixture
def h200(monkeypatch):
    """An H200 with every package, as far as the table can tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuned, "_device", lambda index: ("NVIDIA H200", 90))
    monkeypatch.setattr(support_row, "unusable", lambda package: None)
    support._choose.cache_clear()
    support._measured.cache_clear()


# Rows from which on attention of so many heads is CUDA C++ instead of Triton, below 64 rows.
IN_CUDA_FROM = {
    ("bf16_1152", 8): 8,
    ("bf16_1152", 16): 4,
    ("bf16_1152", 32): 2,
    ("fp8_656", 8): 16,
    ("fp8_656", 16): 8,
    ("fp8_656", 32): 8,
}


@pytest.mark.parametrize(("layout", "heads"), IN_CUDA_FROM)
def test_attention_of_few_rows_goes_by_their_number(h200, layout, heads):
    first = IN_CUDA_FROM[layout, heads]
    for rows in range(1, 64):
        choice = support.choose(
            "sparse_mla", device="cuda", sm=90, layout=layout, heads=heads, k=2048, dtype=torch.bfloat16, rows=rows
        )
        assert choice.name == ("triton" if rows < first else "cuda"), rows
        assert "NVIDIA H200" in choice.reason


def test_a_server_names_the_rows_of_its_choice(h200):
    found = plan.operator_choices("cuda", "bf16_1152", 90, torch.bfloat16, 16, index_heads=64, topk=2048)
    assert found["sparse_mla"].words == "triton, cuda from 4 rows on"
    assert found["sparse_mla"].names == {"triton", "cuda"}


def test_heads_count_ahead_of_rows(h200):
    """The nearest number of heads decides, of its rows the last step; never a nearer step of other heads."""

    def chosen(heads, rows):
        return support.choose(
            "sparse_mla", device="cuda", sm=90, layout="fp8_656", heads=heads, k=2048, dtype=torch.bfloat16, rows=rows
        ).name

    assert [chosen(64, rows) for rows in (1, 4, 15, 16)] == ["triton", "cuda", "cuda", "cuda"]
    assert [chosen(128, rows) for rows in (1, 2, 4, 16)] == ["cuda", "cuda", "flash_mla_kv", "flash_mla_kv"]
    assert chosen(40, 4) == chosen(32, 4) == "triton"
    given = {("a", "b", 0): {16: "one", 64: "one"}, ("a", "b", 4): {16: "two"}}
    assert [tuned.nearest(given, "a", "b", heads, 5) for heads in (16, 24, 64, 48)] == ["two", "two", "one", "one"]
    assert tuned.nearest(given, "a", "b", 16, 3) == "one"


def test_the_shipped_choices_follow_from_their_figures():
    """Nothing of this package's was faster than what is taken, and nothing else by more than the margin."""
    from sglang_dsa_plugin.support_row import OURS
    from sglang_dsa_plugin.tools.bench_points import MARGIN

    for path in tuned.FOLDER.glob("*.json"):
        for entry in json.loads(path.read_text())["choices"]:
            us, taken = entry["us"], entry["us"][entry["implementation"]]
            assert taken <= min(us[name] for name in OURS & us.keys()), entry
            assert MARGIN * taken <= min(us.values()), entry
