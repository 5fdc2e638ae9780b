"""An uncaught refusal ends a process with one line and exit code 1; every other exception keeps its traceback."""

import subprocess
import sys

import pytest

from sglang_dsa_plugin.adapter import refusals

SAY = "from sglang_dsa_plugin.adapter import refusals\nrefusals.print_in_one_line()\nrefusals.print_in_one_line()\n"


def end_of(code: str) -> tuple[int, str]:
    ended = subprocess.run([sys.executable, "-c", SAY + code], capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("module", "name"), [("kernel_flags", "Refusal"), ("config_keys", "UnsupportedModel"), ("settings", "BadSetting")]
)
def test_a_refusal_is_one_line(module, name):
    code = f"from sglang_dsa_plugin.{module} import {name}\nraise {name}('--page-size 32 cannot be served; use 64')"
    assert end_of(code) == (1, f"{refusals.PREFIX}--page-size 32 cannot be served; use 64\n")


def test_another_error_keeps_its_traceback():
    status, said = end_of("raise ValueError('a fault')")
    assert status == 1 and said.startswith("Traceback") and said.endswith("ValueError: a fault\n")


def test_a_refusal_can_be_caught():
    code = "from sglang_dsa_plugin.plan import Refusal\ntry: raise Refusal('no')\nexcept ValueError: print('caught')"
    assert end_of(code) == (0, "")
