"""`sglang-dsa check`: every implementation that runs on this machine against the fp64 reference of its operator."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass
class Verdict:
    """One implementation on one device. worst: largest error as a share of its bound; at most 1 is right."""

    operator: str
    implementation: str
    device: str
    cases: int
    worst: float
    worst_case: str
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.worst <= 1


def check(
    only: Annotated[str, typer.Option(help="operators whose name holds this text")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda, or all that are here")] = "all",
    json_out: Annotated[Path | None, typer.Option("--json", help="also write the verdicts to this file")] = None,
) -> None:
    """Check every implementation that runs here against its fp64 reference; exit status 1 when one is wrong."""
    import torch

    here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if device not in (*here, "all"):
        raise typer.BadParameter(f"--device {device}: this machine has {', '.join(here)}")
    verdicts = [v for name in (here if device == "all" else [device]) for v in verdicts_on(name, only)]
    if not verdicts:
        from sglang_dsa_plugin import support

        known = ", ".join(sorted(support.operators()))
        raise typer.BadParameter(f"--only {only}: no operator has this in its name; there are {known}")
    if json_out is not None:
        json_out.write_text(json.dumps([asdict(v) for v in verdicts], indent=1) + "\n")
    show(verdicts)
    if not all(v.ok for v in verdicts):
        raise typer.Exit(1)


def verdicts_on(device: str, only: str = "") -> list[Verdict]:
    """One verdict per operator and exact implementation whose row of the support table serves some case on `device`."""
    import torch

    from sglang_dsa_plugin import support
    from sglang_dsa_plugin.tools import check_cases

    found: dict[tuple[str, str], Verdict] = {}
    where = torch.device(device)
    with torch.inference_mode():
        for case in check_cases.cases():
            if only not in case.operator:
                continue
            for row in support.rows(case.operator):
                if not row.exact:  # it does not claim the reference's answer
                    continue
                try:
                    support.choose(case.operator, device=where, impl=row.name, **case.features)  # type: ignore[arg-type]
                except support.NotServed:
                    continue
                key = (case.operator, row.name)
                verdict = found.setdefault(key, Verdict(*key, device, 0, 0.0, ""))
                verdict.cases += 1
                try:
                    share = case.share(where, row.name)
                except Exception as error:
                    verdict.error, verdict.worst_case = f"{type(error).__name__}: {error}"[:500], case.label
                    continue
                if not share <= verdict.worst or not verdict.worst_case:
                    verdict.worst, verdict.worst_case = share, case.label
    return list(found.values())


def show(verdicts: list[Verdict]) -> None:
    """The verdicts as a table, then one line in words."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("operator", "by", "device", "cases", "error / bound", "", show_edge=False, pad_edge=False)
    table.columns[0].no_wrap = True
    for v in verdicts:
        worst = "equal" if v.worst == 0 else f"{v.worst:.2g}"
        state = "[green]ok[/]" if v.ok else f"[bold red]wrong[/]: {escape(v.error or v.worst_case)}"
        table.add_row(v.operator, v.implementation, v.device, str(v.cases), "-" if v.error else worst, state)
    console = Console(highlight=False)
    console.print(table)
    wrong = [v for v in verdicts if not v.ok]
    console.print(f"{len(verdicts)} implementations checked, {len(wrong)} wrong")
