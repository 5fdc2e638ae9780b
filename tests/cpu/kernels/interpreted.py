"""Runs a file of tests again in a process with Triton's interpreter in place of the compiler, which must be chosen
before Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def assert_passes(file: str, *options: str) -> None:
    """Whether the tests of `file` pass there; options: of pytest."""
    root = Path(__file__).parents[3]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(Path(file).relative_to(root))],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
