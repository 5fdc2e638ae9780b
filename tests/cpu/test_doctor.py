"""sglang-dsa doctor: the keys and exit status others rely on, and that it speaks where things are broken."""

import json

import pytest
from typer.testing import CliRunner

from sglang_dsa_plugin import support
from sglang_dsa_plugin.adapter import contract
from sglang_dsa_plugin.cli import app
from sglang_dsa_plugin.tools import doctor, kernel_packages

KEYS = {"versions", "platform", "device", "kernels", "choices", "contract", "problems"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Importing SGLang takes half a minute, and adapter/test_contract.py checks the real contract already."""
    real = kernel_packages.examine
    monkeypatch.setattr(contract, "problems", list)
    monkeypatch.setattr(kernel_packages, "examine", dict)
    for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_DSA_PLUGIN", "SGLANG_DSA_PLUGIN_IMPL"):
        monkeypatch.delenv(name, raising=False)
    return real


def run(*arguments):
    """Exit status and the report of `sglang-dsa doctor --json`."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    return result.exit_code, json.loads(result.stdout)


def test_healthy_machine_has_all_keys_no_problems_and_status_0():
    status, report = run()
    assert set(report) == KEYS
    assert report["problems"] == []
    assert status == 0
    assert report["contract"]["ok"] is True
    assert report["platform"]["class"].endswith(("DsaCpuPlatform", "DsaCudaPlatform"))
    assert set(report["choices"]["operators"]) == {row.operator for row in support.rows()}


def test_every_plan_names_its_layout_or_why_it_is_refused():
    _, report = run()
    plans = {(p["model_dtype"], p["kv_cache_dtype"]): p for p in report["choices"]["plans"]}
    assert set(plans) == {(d, kv) for d in ("bfloat16", "float32") for kv in ("auto", "bf16", "fp8_e4m3")}
    assert plans["bfloat16", "auto"]["latent_layout"] == "bf16_1152"
    assert plans["bfloat16", "fp8_e4m3"]["latent_layout"] == "fp8_656"
    assert plans["float32", "auto"]["latent_layout"] == "fp32_2304"
    assert plans["float32", "auto"]["index_key_dtype"] == "float32"


def test_broken_contract_is_a_problem_and_status_1(monkeypatch):
    monkeypatch.setattr(contract, "problems", lambda: ["sglang.srt.gone is missing"])
    status, report = run()
    assert status == 1
    assert report["contract"] == {
        "ok": False,
        "installed": report["versions"]["sglang"],
        "supported": str(contract.SGLANG_RANGE),
        "tested": contract.TESTED,
        "problems": ["sglang.srt.gone is missing"],
    }
    assert report["problems"] == ["contract with SGLang: sglang.srt.gone is missing"]


def test_sglang_that_does_not_import_is_a_problem(monkeypatch):
    def explode():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(contract, "problems", explode)
    status, report = run()
    assert status == 1
    assert "importing SGLang fails: OSError: libcuda.so.1" in report["problems"][0]


def test_missing_sglang_is_a_problem_and_the_rest_is_still_told(monkeypatch):
    def version(package):
        if package == "sglang":
            raise doctor.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(doctor, "version", version)
    status, report = run()
    assert status == 1
    assert report["versions"]["sglang"] is None
    assert any("sglang is not installed; installing" in p for p in report["problems"])
    assert report["choices"]["operators"]


def test_missing_torch_is_a_problem(monkeypatch):
    def version(package):
        raise doctor.PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "version", version)
    status, report = run()
    assert status == 1
    assert any(p.startswith("torch is not installed") for p in report["problems"])
    assert set(report) == KEYS


def test_switched_off_plugin_is_a_problem(monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN", "off")
    status, report = run()
    assert status == 1
    assert report["platform"] == {"class": None, "reason": "SGLANG_DSA_PLUGIN=off"}


@pytest.mark.parametrize("variable", ["SGLANG_PLUGINS", "SGLANG_PLATFORM"])
def test_another_plugin_selected_is_a_problem(monkeypatch, variable):
    monkeypatch.setenv(variable, "other")
    status, report = run()
    assert status == 1
    assert [p for p in report["problems"] if p.startswith(f"{variable}=other")]
    monkeypatch.setenv(variable, "sglang_dsa")
    assert run()[0] == 0


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SGLANG_DSA_PLUGIN", "yes"),
        ("SGLANG_DSA_PLUGIN_SCORES_MB", "-3"),
        ("SGLANG_DSA_PLUGIN_INDEX_KEYS", "int4"),
        ("SGLANG_DSA_PLUGIN_WARMUP", "yes"),
    ],
)
def test_mistyped_setting_is_named(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    status, report = run()
    assert status == 1
    (told,) = report["problems"]
    assert told.startswith(f"{variable}={value!r} is not allowed; use ")


def test_operator_without_implementation_is_named(monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_IMPL", "nonesuch")
    status, report = run()
    assert status == 1
    assert report["choices"]["operators"]["sparse_mla"]["implementation"] is None
    assert any("SGLANG_DSA_PLUGIN_IMPL='nonesuch': no operator has" in p for p in report["problems"])


def test_implementation_that_does_not_load_is_a_problem(monkeypatch):
    rows = list(support._ROWS)
    broken = support.Implementation("sparse_mla", "torch", "sglang_dsa_plugin.kernels.torch_impl.gone:nothing")
    monkeypatch.setattr(support, "_ROWS", [broken if r.operator == "sparse_mla" else r for r in rows])
    support._choose.cache_clear()
    status, report = run()
    support._choose.cache_clear()
    assert status == 1
    assert any("sparse_mla" in p and "gone" in p for p in report["problems"])


def test_tables_show_problems_and_verdict(monkeypatch):
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "ok: a DSA model can be served" in result.stdout
    assert "fp8_656" in result.stdout
    monkeypatch.setattr(contract, "problems", lambda: ["symbol [x] is missing"])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "problem: contract with SGLang: symbol [x] is missing" in result.stdout
    assert "ok:" not in result.stdout


def test_kernel_packages_survive_one_that_fails_and_one_that_kills_the_process(monkeypatch, tmp_path, quick):
    (tmp_path / "good_kernel.py").write_text("print('noise on standard output')\n")
    (tmp_path / "bad_kernel.py").write_text("raise OSError('no such library\\nsecond line')\n")
    (tmp_path / "deadly_kernel.py").write_text("import os\nos._exit(7)\n")
    names = ("bad_kernel", "deadly_kernel", "good_kernel")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(kernel_packages, "PACKAGES", {name: "typer" for name in names} | {"none": "no-such-package"})
    found = quick()
    assert [found[name]["imports"] for name in names] == [False, False, True]
    assert found["bad_kernel"]["error"] == "OSError: no such library"
    assert "status 7" in found["deadly_kernel"]["error"]
    assert found["good_kernel"]["error"] is None
    assert found["none"]["version"] is None
