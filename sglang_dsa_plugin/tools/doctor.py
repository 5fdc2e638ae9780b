"""sglang-dsa doctor: what is installed here, which choices the plugin makes and why, and what stands in the way.

The answers come from where the server takes them (support table, plan, platform choice, contract), so where the
question is the same, so is the answer. It must still speak where torch or sglang is missing or broken; therefore
they are imported inside the functions that need them, and a failure becomes a problem in words.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Annotated, Any

import typer

from sglang_dsa_plugin import __version__, settings
from sglang_dsa_plugin.adapter import refusals
from sglang_dsa_plugin.tools import kernel_packages

PACKAGES = ("sglang", "torch", "transformers", "triton")
ENTRY_POINTS = ("sglang.srt.plugins", "sglang.srt.platforms")
NAME = "sglang_dsa"
KV_CACHE_DTYPES = ("auto", "bf16", "fp8_e4m3")
MODEL_DTYPES = ("bfloat16", "float32")


@dataclass
class Report:
    """What the doctor found; the fields are the keys of --json. `problems` is empty when a DSA model can be served."""

    versions: dict[str, str | None] = field(default_factory=dict)
    platform: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)
    contract: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say what is installed, which choices apply here and why; exit status 1 when no DSA model could be served."""
    # sglang prints and warns while it is imported; standard output is for the report alone.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(action="ignore"):
        report = examine()
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        from sglang_dsa_plugin.tools import doctor_tables

        doctor_tables.show(report)
    if report.problems:
        raise typer.Exit(1)


def examine() -> Report:
    """Look at everything; a part that fails is noted as a problem, and the others are looked at all the same."""
    report = Report()
    for part in (_versions, _platform, _device, _kernels, _choices, _contract):
        try:
            part(report)
        except Exception as error:
            says_all = refusals.is_refusal(error)
            where = "" if says_all else f"{part.__name__.strip('_')}: {type(error).__name__}: "
            report.problems.append(f"{where}{error}")
    report.problems = list(dict.fromkeys(report.problems))
    return report


def _versions(report: Report) -> None:
    report.versions = {"python": sys.version.split()[0], "sglang-dsa-plugin": __version__}
    for package in PACKAGES:
        try:
            report.versions[package] = version(package)
        except PackageNotFoundError:
            report.versions[package] = None
    if report.versions["torch"] is None:
        report.problems.append("torch is not installed; installing this package with pip (without --no-deps) brings it")


def _platform(report: Report) -> None:
    for group in ENTRY_POINTS:
        if not any(point.name == NAME for point in entry_points(group=group)):
            report.problems.append(
                f"the entry point {NAME} of {group} is not registered, so SGLang cannot find the plugin; install the "
                "package (pip install .) instead of only putting it on the path"
            )
    for variable, words in (("SGLANG_PLUGINS", "loads only these plugins"), ("SGLANG_PLATFORM", "takes this platform")):
        chosen = os.environ.get(variable, "")
        if chosen and NAME not in [name.strip() for name in chosen.split(",")]:
            report.problems.append(f"{variable}={chosen}: SGLang {words}, not {NAME}; unset it or add {NAME}")
    if report.versions.get("torch") is None:
        return
    from sglang_dsa_plugin.adapter.platform import choose_platform

    settings.plugin_enabled()  # a bad value is told as what it is
    path, reason = choose_platform()
    report.platform = {"class": path, "reason": reason}
    if path is None:
        report.problems.append(f"the plugin stands aside here and serves nothing: {reason}")


def _device(report: Report) -> None:
    if report.versions.get("torch") is None:
        return
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report.device = {"type": "cpu", "cpu_cores": cores, "torch_threads": torch.get_num_threads(), "gpus": []}
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        report.device |= {
            "type": "cuda",
            "cuda": torch.version.cuda,
            "gpus": [{"name": g.name, "sm": 10 * g.major + g.minor, "memory_bytes": g.total_memory} for g in gpus],
        }


def _kernels(report: Report) -> None:
    report.kernels = kernel_packages.examine()


def _choices(report: Report) -> None:
    report.choices = {"settings": settings.table(), "operators": {}, "plans": []}
    if not report.device:
        return
    from sglang_dsa_plugin import support

    device, sm = report.device["type"], (report.device["gpus"] or [{}])[0].get("sm")
    for operator in support.operators():
        report.choices["operators"][operator] = _operator(report, operator, device, sm)
    for dtype in MODEL_DTYPES:
        for kv in KV_CACHE_DTYPES:
            report.choices["plans"].append(_plan(report, dtype, kv, device, sm))


def _operator(report: Report, operator: str, device: str, sm: int | None) -> dict[str, str | None]:
    from sglang_dsa_plugin import plan, support

    try:
        # As in decode of one request; many rows and heads may take another, which the server's start-up line has.
        choice = support.choose(operator, device=device, sm=sm, impl=plan.forced_impl(operator), rows=1)
        choice.implementation.load()
    except Exception as error:
        says_all = isinstance(error, support.NotServed) or refusals.is_refusal(error)
        report.problems.append(str(error) if says_all else f"{operator}: {error!r}")
        return {"implementation": None, "reason": str(error)}
    return {"implementation": choice.name, "reason": choice.reason}


def _plan(report: Report, model_dtype: str, kv_cache_dtype: str, device: str, sm: int | None) -> dict[str, Any]:
    import torch

    from sglang_dsa_plugin import plan, support

    row: dict[str, Any] = {"model_dtype": model_dtype, "kv_cache_dtype": kv_cache_dtype}
    try:
        found = plan.plan_serving(
            model_dtype=getattr(torch, model_dtype), kv_cache_dtype=kv_cache_dtype, device=device, sm=sm
        )
    except (plan.Refusal, support.NotServed) as error:
        # An operator without an implementation is a problem already.
        if isinstance(error, plan.Refusal):
            report.problems.append(f"a {model_dtype} model with --kv-cache-dtype {kv_cache_dtype}: {error}")
        return row | {"refused": str(error)}
    return row | {
        "latent_layout": found.latent.name,
        "latent_row_bytes": found.latent.row_bytes,
        "index_key_dtype": str(found.index_key_dtype).removeprefix("torch."),
        "reasons": found.reasons,
    }


def _contract(report: Report) -> None:
    """Check every name of SGLang the plugin relies on. This imports SGLang and takes most of the doctor's time."""
    if report.versions.get("sglang") is None:
        report.contract = {"ok": False, "problems": ["sglang is not installed"]}
        report.problems.append(
            "sglang is not installed; installing this package with pip (without --no-deps) brings it"
        )
        return
    from sglang_dsa_plugin.adapter import contract

    found = _caught(contract.problems)
    report.contract = {
        "ok": not found,
        "installed": report.versions["sglang"],
        "supported": str(contract.SGLANG_RANGE),
        "tested": contract.TESTED,
        "problems": found,
    }
    report.problems += [f"contract with SGLang: {problem}" for problem in found]


def _caught(check: Callable[[], list[str]]) -> list[str]:
    try:
        return check()
    except Exception as error:
        return [f"importing SGLang fails: {type(error).__name__}: {error}"]
