"""The documentation against the code: quoted messages, settings, links and file names exist."""

import argparse
import ast
import functools
import re
from pathlib import Path

import pytest

from sglang_dsa_plugin import settings
from sglang_dsa_plugin.tools.serve_plan import CPU_DEFAULTS, CPU_SWITCHES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def section(title):
    """The text below the heading `title`, up to the next heading of its level."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.S | re.M).group(1)


@functools.cache
def texts_of_the_code():
    """Every string of the package and the text of the scripts; what an f-string fills in becomes a NUL."""
    texts = [script.read_text() for script in (ROOT / "scripts").glob("*.sh")]
    for file in (ROOT / "sglang_dsa_plugin").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(p.value if isinstance(p, ast.Constant) else "\0" for p in node.values))
    return texts


MESSAGES = re.findall(r"^\| `(.+?)` \|", section("Troubleshooting"), re.M)


def test_there_are_messages_to_check():
    assert len(MESSAGES) > 15


@pytest.mark.parametrize("message", MESSAGES)
def test_quoted_message_is_one_the_code_can_give(message):
    pattern = re.compile(".*?".join(map(re.escape, message.split("..."))), re.S)
    assert any(pattern.search(text) for text in texts_of_the_code())


def test_settings_table_is_the_table_of_the_code():
    rows = dict(re.findall(r"^\| `(SGLANG_DSA_PLUGIN\w*)` \|(.*?)\|", section("Configuration"), re.M))
    told = {name: default.strip(" `") for name, default in rows.items()}
    assert told == {setting.env: setting.default for setting in settings.SETTINGS.values()}


def test_cpu_defaults_are_told():
    for text in (README, (ROOT / "scripts" / "serve.sh").read_text()):
        for flag, value in CPU_DEFAULTS.items():
            assert f"{flag} {value}" in text
        for flag in CPU_SWITCHES:
            assert flag in text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_inside_the_repository_lead_somewhere(page):
    headings = {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    }
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        assert (page.parent / path).exists(), target
        assert not anchor or path or anchor in headings, target


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_config_files_hold_flags_of_sglang_and_say_whether_they_were_tried(config):
    import yaml
    from sglang.srt.server_args import ServerArgs

    text = config.read_text()
    assert re.search(r"^# (Tried|Not tried)", text, re.M)
    flags = yaml.safe_load(text)
    assert flags["attention-backend"] == "dsa"
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert not {f"--{key}" for key in flags} - known


def test_the_support_page_is_what_the_table_says():
    from sglang_dsa_plugin.tools import support_page

    page = (ROOT / "docs" / "support.md").read_text()
    assert page == support_page.page(), "run: python -m sglang_dsa_plugin.tools.support_page > docs/support.md"
    gpus, rest = re.findall(r"^## (SM .*)$", page, re.M), re.findall(r"^## (?!SM )(.*)$", page, re.M)
    sms = sorted(float(sm) for title in gpus for sm in re.findall(r"SM (\d+\.\d)", title))
    assert sms == [8.0, 8.6, 8.9, 9.0, 10.0, 10.3, 12.0, 12.1]
    assert rest == ["CPU", "By name", "Combinations"]
