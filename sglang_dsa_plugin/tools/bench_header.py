"""What heads the JSON of every benchmark, and how it is written: a figure says device, command, date and versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_dsa_plugin import __version__

PACKAGES = ("torch", "triton", "numba", "sglang", "sglang-kernel", "sgl-deep-gemm", "sgl-flash-mla")


def header(device: str | dict[str, Any]) -> dict[str, Any]:
    """What this process was asked, when, and what it runs on."""
    return {
        "command": " ".join(["sglang-dsa", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "versions": {"sglang-dsa-plugin": __version__, "python": platform.python_version()}
        | {package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(path: Path, whole: dict[str, Any]) -> None:
    """Write the record so that a reader, or a run that is killed now, finds the old file or the new one."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(whole, indent=1) + "\n")
    beside.replace(path)


def cpu_name() -> str:
    """Model name of the CPU and the cores this process may use."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown CPU")
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def gpu_name() -> str:
    """Name and driver of the first GPU, from nvidia-smi; the visible device when CUDA_VISIBLE_DEVICES names one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run([*query, *(["-i", visible] if visible else [])], capture_output=True, text=True)
    except FileNotFoundError:
        return "no nvidia-smi"
    return answer.stdout.strip().splitlines()[0] if answer.stdout.strip() else "no GPU"
