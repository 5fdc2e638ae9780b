"""Measured choices: what `sglang-dsa bench tune` found fastest, one file a GPU in `tuned/`, read by the support table.

A file is JSON: {"device": name as CUDA gives it, "sm": its compute capability as 10 * major + minor, "choices":
[{"operator", "layout", "heads", "min_rows", "implementation"}, ...], ...}; the rest of it is the evidence. A GPU
without a file of its own takes that of another one of its compute capability, the first by name. A shape without an
entry and an implementation that cannot run are no errors: the table's own order serves them.
"""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import torch

from sglang_dsa_plugin.support_row import NotServed

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
) -> tuple[str, str] | None:
    """The implementation that was fastest on the CUDA device `index` (None: the current one) or on one of its compute
    capability, and the name of the device on which it was; None where nothing was measured.

    sm: the capability that is asked about, 10 * major + minor; a question about another GPU than the one here has no
    answer.  layout, heads: of the request.  rows: least number of query rows, one of support_row.ROW_STEPS.
    """
    if layout is None or heads is None or rows is None or not torch.cuda.is_available():
        return None
    name, here = _device(torch.cuda.current_device() if index is None else index)
    if sm != here:
        return None
    path = file_for(name, here)
    if path is None:
        return None
    best = nearest(read(path), operator, layout, heads, rows)
    return None if best is None else (best, _table(path)["device"])


@functools.cache
def file_for(device_name: str, sm: int) -> Path | None:
    """The file that serves the GPU with this name and compute capability; without a name, any of the capability."""
    own = path_of(device_name)
    if device_name and own.is_file():
        return own
    whole = (path for path in sorted(FOLDER.glob("*.json")) if not path.stem.endswith(".partial"))
    return next((path for path in whole if _table(path)["sm"] == sm), None)


def nearest(choices: Choices, operator: str, layout: str, heads: int, rows: int) -> str | None:
    """The choice of the number of heads nearest by ratio, the larger of two as near; None beyond a factor of 2. Of the
    steps of rows that were measured with so many heads, the last one up to `rows` counts.
    """
    steps = sorted(step for op, rows_of, step in choices if (op, rows_of) == (operator, layout) and step <= rows)
    measured = {known: name for step in steps for known, name in choices[operator, layout, step].items()}
    if not measured:
        return None
    best = min(measured, key=lambda known: (abs(math.log(known / heads)), -known))
    return measured[best] if 1 / _NEAR <= best / heads <= _NEAR else None


@functools.cache
def read(path: Path) -> Choices:
    """The choices of a file. Raises NotServed, a ValueError, naming the file when it is damaged."""
    found: Choices = {}
    try:
        for entry in _table(path)["choices"]:
            key = (entry["operator"], entry["layout"], int(entry["min_rows"]))
            found.setdefault(key, {})[int(entry["heads"])] = entry["implementation"]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error
    return found


@functools.cache
def _table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text())
        return {"device": str(table["device"]), "sm": table.get("sm"), "choices": table["choices"]}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> NotServed:
    return NotServed(f"{path}: not a table of `sglang-dsa bench tune`: {type(error).__name__}: {error}")


@functools.cache
def _device(index: int) -> tuple[str, int]:
    major, minor = torch.cuda.get_device_capability(index)
    return torch.cuda.get_device_name(index), 10 * major + minor
