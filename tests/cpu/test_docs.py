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


def modules(folder):
    return {file.stem for file in (ROOT / "sglang_dsa_plugin" / folder).glob("*.py")} - {"__init__"}


def first_column(text):
    """Names in the first column of the tables in `text`."""
    return [name for row in re.findall(r"^\| (`.+?) \|", text, re.M) for name in re.findall(r"`(.+?)`", row)]


def test_the_map_names_every_module_once_and_no_other():
    page = (ROOT / "docs" / "files.md").read_text()
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    parts = dict(re.findall(r"^## (\S+)/\n(.*?)(?=^## |\Z)", page, re.S | re.M))
    parts["adapter/hooks"] = architecture.split("\n## Hooks\n")[1].split("\n## ")[0]
    for folder, text in parts.items():
        assert sorted(first_column(text)) == sorted(modules(folder)), folder
    folders = {
        str(file.parent.relative_to(ROOT / "sglang_dsa_plugin")) for file in ROOT.glob("sglang_dsa_plugin/**/*.py")
    }
    assert folders == {*parts, ".", "kernels"} and not modules("kernels")
    beside = first_column(architecture.split("\n## The parts\n")[1].split("\n## ")[0])
    assert sorted(name for name in beside if name.endswith(".py")) == sorted(f"{name}.py" for name in modules("."))


def imported(file):
    """Full names of what a module imports."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += [node.module] if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_only_adapter_and_tools_import_sglang_and_only_tools_import_adapter():
    for file in (ROOT / "sglang_dsa_plugin").rglob("*.py"):
        if file.relative_to(ROOT / "sglang_dsa_plugin").parts[0] not in ("adapter", "tools"):
            taken = [name for name in imported(file) if re.match(r"sglang(_dsa_plugin\.adapter)?(\.|$)", name)]
            assert not taken, (file, taken)


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
