"""`sglang-dsa check`: it looks at every operator, passes what is right and fails what is wrong."""

import json

import pytest
import torch
from typer.testing import CliRunner

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cli import app
from sglang_dsa_plugin.kernels.torch_impl import select, sparse_mla
from sglang_dsa_plugin.ops import quant
from sglang_dsa_plugin.tools import check, check_cases
from sglang_dsa_plugin.tools.check_judges import spread_of


@pytest.fixture(scope="module")
def cases():
    return list(check_cases.cases())


@pytest.fixture(autouse=True)
def made_once(cases, monkeypatch):
    """The fp64 answers of the cases take longest, and are the same in every test."""
    monkeypatch.setattr(check_cases, "cases", lambda: iter(cases))


def test_every_operator_has_a_case(cases):
    assert {case.operator for case in cases} == {row.operator for row in support.rows()}


def test_all_is_right_on_a_cpu(tmp_path):
    out = tmp_path / "verdicts.json"
    result = CliRunner().invoke(app, ["check", "--device", "cpu", "--json", str(out)])
    assert result.exit_code == 0, result.output
    verdicts = json.loads(out.read_text())
    assert {v["operator"] for v in verdicts} == {row.operator for row in support.rows()}
    assert all(v["error"] is None and v["worst"] <= 1 and v["cases"] for v in verdicts)


def off_by_a_pick(*arguments, **options):
    picks = select.topk(*arguments, **options)
    return torch.where(picks == picks.amax(), picks - 1, picks)


def off_by_a_percent(*arguments, **options):
    out, lse = sparse_mla.sparse_mla(*arguments, **options)
    return out * 1.02, lse


def not_a_number(*arguments, **options):
    out, lse = sparse_mla.sparse_mla(*arguments, **options)
    return torch.full_like(out, torch.nan), lse


def plus_infinity(*arguments, **options):
    out, lse = sparse_mla.sparse_mla(*arguments, **options)
    return out, torch.where(torch.isinf(lse), torch.inf, lse)


def nothing(*_arguments, **_options):
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(
    ("operator", "wrong", "said"),
    [
        ("topk", off_by_a_pick, "ties"),
        ("sparse_mla", off_by_a_percent, "heads"),
        ("sparse_mla", not_a_number, "heads"),
        ("sparse_mla", plus_infinity, "heads"),
        ("topk", nothing, "no kernel image"),
    ],
)
def test_what_is_wrong_is_named(monkeypatch, tmp_path, operator, wrong, said):
    row = support.Implementation(operator, "wrong", wrong)
    monkeypatch.setattr(support, "_ROWS", [*(r for r in support.rows(operator) if r.name == "torch"), row])
    support._choose.cache_clear()
    try:
        out = tmp_path / "verdicts.json"
        result = CliRunner().invoke(app, ["check", "--device", "cpu", "--only", operator, "--json", str(out)])
        assert result.exit_code == 1 and "1 wrong" in result.output
        verdicts = [check.Verdict(**verdict) for verdict in json.loads(out.read_text())]
        right, bad = (v for v in verdicts if v.operator == operator)
        assert right.ok and right.implementation == "torch"
        assert not bad.ok and bad.implementation == "wrong" and said in (bad.error or bad.worst_case)
    finally:
        support._choose.cache_clear()


def test_a_name_that_no_operator_has():
    result = CliRunner().invoke(app, ["check", "--device", "cpu", "--only", "nonesuch"])
    assert result.exit_code == 2 and "nonesuch" in result.output


def test_the_spread_is_attention_to_the_sizes_of_the_values():
    """Slots past the length, outside the cache and -1 do not count; a row without a slot has none."""
    g = torch.Generator().manual_seed(1)
    rows = quant.quantize_latent(torch.randn(40, 512, generator=g), torch.randn(40, 64, generator=g), "fp8_576", 0.5)
    q, slots = torch.randn(4, 2, 576, generator=g), torch.randint(0, 40, (4, 9), generator=g, dtype=torch.int32)
    slots[0, 2:5], slots[1, 3], slots[2] = -1, 40, -1
    lengths = torch.tensor([9, 9, 9, 4])
    got = spread_of(q, rows, slots, 0.1, "fp8_576", 0.5, lengths)
    values = quant.dequantize_latent(rows, "fp8_576", 0.5).double()
    for r in range(4):
        mine = [s for s in slots[r, : lengths[r]].tolist() if 0 <= s < 40]
        weights = torch.softmax(0.1 * q[r].double() @ values[mine].T, dim=1) if mine else torch.zeros(2, 0).double()
        assert torch.allclose(got[r], weights @ values[mine, :512].abs(), atol=1e-12)
    assert (got[2] == 0).all() and got.dtype == torch.float64
