"""Measured choices: what `sglang-dsa bench tune` found fastest, one file a GPU in `tuned/`, read by the support table.

A file is JSON: {"device": name as CUDA gives it, "choices": [{"operator", "layout", "heads", "min_rows",
"implementation"}, ...], ...}; the rest of it is the evidence. A GPU without a file, a shape without an entry and an
implementation that cannot run are no errors: the table's own order serves them.
"""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "tuned"
# A shape takes its heads' nearest neighbour, up to this factor away.
_NEAR = 2.0

# (operator, layout, least rows) -> heads -> implementation
Choices = dict[tuple[str, str, int], dict[int, str]]


def path_of(device_name: str) -> Path:
    """The file of the GPU with this name: `tuned/nvidia_h200.json` for "NVIDIA H200"."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_") + ".json")


def preferred(
    operator: str, sm: int | None, index: int | None, layout: str | None, heads: int | None, rows: int | None
) -> str | None:
    """The implementation that was fastest on the CUDA device `index` (None: the current one), or None.

    sm: the capability that is asked about, 10 * major + minor; a question about another GPU than the one here has no
    answer.  layout, heads: of the request.  rows: least number of query rows, one of support_row.ROW_STEPS.
    """
    if layout is None or heads is None or rows is None or not torch.cuda.is_available():
        return None
    name, here = _device(torch.cuda.current_device() if index is None else index)
    if sm != here:
        return None
    return nearest(read(path_of(name)), operator, layout, heads, rows)


def nearest(choices: Choices, operator: str, layout: str, heads: int, rows: int) -> str | None:
    """The choice of the number of heads nearest by ratio, the larger of two as near; None beyond a factor of 2."""
    measured = choices.get((operator, layout, rows), {})
    if not measured:
        return None
    best = min(measured, key=lambda known: (abs(math.log(known / heads)), -known))
    return measured[best] if 1 / _NEAR <= best / heads <= _NEAR else None


@functools.cache
def read(path: Path) -> Choices:
    """The choices of a file; empty when it does not exist. Raises ValueError naming the file when it is damaged."""
    if not path.is_file():
        return {}
    found: Choices = {}
    try:
        for entry in json.loads(path.read_text())["choices"]:
            key = (entry["operator"], entry["layout"], int(entry["min_rows"]))
            found.setdefault(key, {})[int(entry["heads"])] = entry["implementation"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a table of `sglang-dsa bench tune`: {type(error).__name__}: {error}") from error
    return found


@functools.cache
def _device(index: int) -> tuple[str, int]:
    major, minor = torch.cuda.get_device_capability(index)
    return torch.cuda.get_device_name(index), 10 * major + minor
