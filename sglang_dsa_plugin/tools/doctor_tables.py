"""The doctor's report as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from sglang_dsa_plugin.tools.doctor import Report


def show(report: Report) -> None:
    """Print the whole report, the verdict last, where it is seen."""
    console = Console(highlight=False)
    for table in (_here(report), _plans(report), _operators(report), _kernels(report), _settings(report)):
        if table.rows:
            console.print(table, "")
    for problem in report.problems:
        console.print(f"[bold red]problem:[/] {escape(problem)}", soft_wrap=True)
    if not report.problems:
        where = report.device.get("type", "")
        console.print(f"[bold green]ok:[/] a DSA model can be served on this machine ({where})")


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    table.columns[0].no_wrap = True
    return table


def _here(report: Report) -> Table:
    table = _table("Installed", "what", "found")
    for package, found in report.versions.items():
        table.add_row(package, found or "not installed")
    if report.platform:
        name = (report.platform["class"] or "none").rpartition(".")[2]
        table.add_row("platform", escape(f"{name} ({report.platform['reason']})"))
    if report.device:
        gpus = [f"{g['name']} (SM {g['sm'] / 10}, {g['memory_bytes'] / 2**30:.0f} GiB)" for g in report.device["gpus"]]
        table.add_row("device", escape("; ".join(gpus) or f"CPU, {report.device['cpu_cores']} cores"))
    if report.contract:
        table.add_row("contract with SGLang", "as expected" if report.contract["ok"] else "broken, see below")
    return table


def _plans(report: Report) -> Table:
    table = _table("What a server would use", "model", "--kv-cache-dtype", "latent row", "index keys")
    for plan in report.choices.get("plans", []):
        if "refused" in plan:
            cells = ("refused", "see below")
        else:
            cells = (f"{plan['latent_layout']}, {plan['latent_row_bytes']} B", plan["index_key_dtype"])
        table.add_row(plan["model_dtype"], plan["kv_cache_dtype"], *cells)
    return table


def _operators(report: Report) -> Table:
    """Operators that run the same way for the same reason share a row."""
    table = _table("Operators, for one row of few heads", "implementation", "why", "of")
    alike: dict[tuple[str, str], list[str]] = {}
    for operator, choice in report.choices.get("operators", {}).items():
        alike.setdefault((choice["implementation"] or "none", choice["reason"]), []).append(operator)
    for (implementation, reason), operators in alike.items():
        table.add_row(implementation, escape(reason), ", ".join(operators))
    return table


def _kernels(report: Report) -> Table:
    table = _table(
        "Optional kernel packages (installed with SGLang, for GPUs only)", "module", "version", "imports here"
    )
    for module, facts in report.kernels.items():
        table.add_row(module, facts["version"] or "-", "yes" if facts["imports"] else escape(f"no: {facts['error']}"))
    return table


def _settings(report: Report) -> Table:
    table = _table("Settings", "variable", "value", "set", "allowed")
    for row in report.choices.get("settings", []):
        table.add_row(row["env"], row["value"] or "-", row["set"], escape(row["allowed"]))
    return table
