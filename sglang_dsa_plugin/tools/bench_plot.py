"""Time against S as a picture: a panel a family of cases, a colour a line of it, solid ours, dashed the built-in."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from sglang_dsa_plugin.tools.bench_run import Result

NEEDED = "--plot needs matplotlib: pip install 'sglang-dsa-plugin[plot]'"


def available() -> bool:
    """Whether matplotlib is installed; it is an optional extra."""
    return importlib.util.find_spec("matplotlib") is not None


def panels(results: Sequence[Result]) -> dict[str, dict[str, list[Result]]]:
    """Panel -> line -> its results by S, of the lines that were measured at two lengths at least."""
    found: dict[str, dict[str, list[Result]]] = {}
    for result in sorted(results, key=lambda r: r.tokens):
        if result.samples.get("ours"):
            found.setdefault(result.panel, {}).setdefault(result.line, []).append(result)
    drawn = {
        panel: {line: points for line, points in lines.items() if len({p.tokens for p in points}) > 1}
        for panel, lines in found.items()
    }
    return {panel: lines for panel, lines in drawn.items() if lines}


def draw(results: Sequence[Result], path: Path, title: str) -> bool:
    """Write the PNG; False, and nothing is written, when no line has two lengths. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = panels(results)
    if not shown:
        return False
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(6 * columns, 4.5 * rows), squeeze=False)
    for axes, (panel, lines) in zip(grid.flat, shown.items()):
        for number, (line, points) in enumerate(lines.items()):
            for side, style in (("ours", "-"), ("rival", "--")):
                at = [(p.tokens, p.spread(side)) for p in points]
                known = [(tokens, spread.median) for tokens, spread in at if spread is not None]
                if known:
                    label = line if side == "ours" else f"{line}, built-in"
                    axes.plot(*zip(*known), style, marker="o", color=f"C{number}", label=label)
        axes.set(title=panel, xlabel="S", ylabel="microseconds a call", xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, handlelength=4)
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
