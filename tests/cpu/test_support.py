"""The support table: every row loads, choices carry reasons, refusals name what is wrong."""

import pytest

from sglang_dsa_plugin import support
from sglang_dsa_plugin.support import Implementation


@pytest.fixture
def own_rows(monkeypatch):
    """The table with its torch rows alone, to be added to."""
    monkeypatch.setattr(support, "_ROWS", [row for row in support.rows("sparse_mla") if row.name == "torch"])
    support._choose.cache_clear()
    yield
    support._choose.cache_clear()


@pytest.mark.parametrize("row", support.rows(), ids=lambda r: f"{r.operator}-{r.name}")
def test_every_row_loads(row):
    assert callable(row.load())


def test_operators_all_run_on_a_cpu():
    for operator in {row.operator for row in support.rows()}:
        choice = support.choose(operator, device="cpu")
        assert choice.name == "torch" and "cpu" in choice.reason


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown operator 'nothing'"):
        support.choose("nothing", device="cpu")
    with pytest.raises(ValueError, match="impl='cuda' does not exist; it has torch, triton"):
        support.choose("topk", device="cpu", impl="cuda")


def fast(**features) -> Implementation:
    return Implementation("sparse_mla", "fast", lambda: None, **features)


@pytest.mark.parametrize(
    ("features", "asked", "why"),
    [
        ({"devices": frozenset({"cuda"})}, {"device": "cpu"}, "runs on cuda, not on cpu"),
        ({"sm": frozenset({90})}, {"device": "cuda", "sm": 120}, "built for SM 9.0, this GPU is SM 12.0"),
        ({"layouts": frozenset({"fp8_656"})}, {"device": "cpu", "layout": "bf16_1152"}, "reads fp8_656, not bf16_1152"),
        ({"heads": frozenset({64, 128})}, {"device": "cpu", "heads": 16}, "takes 64/128 heads, not 16"),
        ({"max_k": 2048}, {"device": "cpu", "k": 2049}, "takes k up to 2048, not 2049"),
    ],
)
def test_a_row_that_cannot_serve_is_passed_over_with_its_reason(own_rows, features, asked, why):
    support.register(fast(**features), before="torch")
    choice = support.choose("sparse_mla", **asked)
    assert choice.name == "torch"
    assert choice.rejected == {"fast": why} and why in choice.reason
    with pytest.raises(ValueError, match="impl='fast' cannot run here"):
        support.choose("sparse_mla", impl="fast", **asked)


def test_registering_puts_a_row_first_once(own_rows):
    support.register(fast(), before="torch")
    support.register(fast(), before="torch")
    assert [row.name for row in support.rows("sparse_mla")] == ["fast", "torch"]
    assert support.choose("sparse_mla", device="cpu").name == "fast"
