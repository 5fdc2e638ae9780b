"""Which optional kernel packages are installed, and whether they can be imported on this machine.

Their import loads CUDA libraries and may print, fail or end the process where those are missing, so it is tried in a
process of its own. One process tries them all, because most of the time goes into the torch that they share; when it
dies, the package it was at is to blame and a new one goes on after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# Module -> distribution.
PACKAGES = {
    "triton": "triton",
    "sgl_kernel": "sglang-kernel",
    "deep_gemm": "sgl-deep-gemm",
    "flash_mla": "sgl-flash-mla",
    "flashinfer": "flashinfer-python",
}
LIMIT_S = 180

_TRY = """
import importlib, json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        error = None
    except BaseException as e:
        lines = str(e).strip().splitlines() or [""]
        error = f"{type(e).__name__}: {lines[0]}"
    print(json.dumps([name, error]), file=answers, flush=True)
"""


def examine() -> dict[str, dict[str, Any]]:
    """Per module: its distribution, version (None: not installed), whether it imports here, and the error if not."""
    found: dict[str, dict[str, Any]] = {}
    for module, distribution in PACKAGES.items():
        try:
            found[module] = {"package": distribution, "version": version(distribution), "imports": False, "error": None}
        except PackageNotFoundError:
            found[module] = {"package": distribution, "version": None, "imports": False, "error": "not installed"}
    left = [module for module, facts in found.items() if facts["version"] is not None]
    while left:
        answers, end = _try(left)
        for module, error in answers.items():
            found[module] |= {"imports": error is None, "error": error}
        left = left[len(answers) :]
        if left:
            found[left[0]]["error"] = end
            left = left[1:]
    return found


def _try(modules: list[str]) -> tuple[dict[str, str | None], str]:
    """Import `modules` in order in one process: the answers it gave, and how it ended if it gave too few."""
    process = subprocess.Popen(
        [sys.executable, "-c", _TRY, *modules], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        end = f"importing it ended the process with status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        end = f"importing it took more than {LIMIT_S} s"
    return dict(json.loads(line) for line in output.splitlines()), end
