"""The table of SGLang names relied on: true for the installed version, and loud about each kind of mismatch."""

import ast
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sglang_dsa_plugin import adapter
from sglang_dsa_plugin.adapter import contract, plugin
from sglang_dsa_plugin.adapter.contract import Symbol


def test_the_installed_sglang_fulfils_it():
    assert contract.problems() == []


def imported_from_sglang():
    """Paths below sglang.srt of the names that the adapter imports to use them."""
    for file in Path(adapter.__path__[0]).rglob("*.py"):
        tree = ast.parse(file.read_text())
        types_only = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        unused = {id(inner) for block in types_only for inner in ast.walk(block)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and id(node) not in unused:
                package, _, module = node.module.partition("sglang.srt.")
                if module and not package:
                    yield from (f"{module}.{name.name}" for name in node.names)


def test_it_holds_every_name_that_the_adapter_imports():
    listed = [symbol.path + "." for symbol in contract.SYMBOLS]
    used = set(imported_from_sglang())
    assert len(used) > 40
    # Asked for by name, SGLang would choose its platform before this package is registered.
    used.remove("platforms.current_platform")
    assert [name for name in sorted(used) if not any(path.startswith(name + ".") for path in listed)] == []


@pytest.mark.parametrize("installed", ["0.5.22", "0.6.0", "1.0"])
def test_a_version_outside_the_range(monkeypatch, installed):
    monkeypatch.setattr(contract, "version", lambda name: installed)
    with pytest.raises(contract.ContractError, match=f"sglang {installed} is outside .* install sglang==0.5.23"):
        contract.require()


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        (Symbol("mem_cache.memory_pool.RenamedPool"), "sglang.srt.mem_cache.memory_pool.RenamedPool is missing"),
        (Symbol("no_such_module.thing"), "sglang.srt.no_such_module.thing is missing"),
        (Symbol("mem_cache.memory_pool.unwrap_write_loc", ("gone",)), "unwrap_write_loc lost its parameter gone"),
        (Symbol("mem_cache.memory_pool.DSATokenToKVPool", ("size", "gone")), "DSATokenToKVPool lost its .* gone"),
    ],
)
def test_a_renamed_symbol_or_parameter_is_named(monkeypatch, symbol, message):
    monkeypatch.setattr(contract, "SYMBOLS", (symbol,))
    with pytest.raises(contract.ContractError, match=message):
        contract.require()


def test_a_question_for_a_method_of_ours_that_is_gone_is_named(monkeypatch):
    monkeypatch.setattr(contract, "ASKED_FOR", ((contract.ASKED_FOR[0][0], "prepare_something_else"), ("gone", "x")))
    found = contract.problems()
    assert found == [
        f"{contract.ASKED_FOR[0][0]} no longer asks for prepare_something_else",
        "gone no longer asks for x",
    ]


def test_a_renamed_resolution_step_is_named(monkeypatch):
    monkeypatch.setattr(contract, "STEPS", ("handle_nothing",))
    assert contract.problems() == ["resolution step handle_nothing is gone"]


@pytest.fixture
def fresh_status(monkeypatch):
    monkeypatch.setattr(plugin, "STATUS", plugin.Status())
    from sglang.srt.arg_groups import resolution_hooks

    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    return resolution_hooks


def run_step(hooks, name: str, args: object) -> list[str]:
    """Run a resolution step as SGLang does; returns what the built-in step saw."""
    seen: list[str] = []

    def builtin(server_args: object) -> None:
        seen.append("built-in")

    builtin.__name__ = name
    hooks.run_hook(builtin, args)
    return seen


class Args:
    attention_backend = prefill_attention_backend = decode_attention_backend = None


def test_a_failure_is_remembered_and_stops_a_server_that_asks_for_dsa(monkeypatch, fresh_status):
    monkeypatch.setitem(sys.modules, "sglang_dsa_plugin.adapter.hooks", None)  # a broken import
    plugin.register()
    assert plugin.STATUS.state == "failed"
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        for value in ("dsa", "nsa"):
            args = Args()
            setattr(args, name, value)
            with pytest.raises(SystemExit, match=r"could not start: .*SGLANG_DSA_PLUGIN=off"):
                run_step(fresh_status, "handle_deprecated_dp_attention", args)
    assert run_step(fresh_status, "handle_deprecated_dp_attention", Args()) == ["built-in"]


def test_a_failure_stops_a_dsa_model_without_the_flag(monkeypatch, fresh_status):
    monkeypatch.setitem(sys.modules, "sglang_dsa_plugin.adapter.hooks", None)
    plugin.register()
    monkeypatch.setattr(plugin, "_model_has_index_topk", lambda args: True)
    with pytest.raises(SystemExit, match="could not start"):
        run_step(fresh_status, "handle_cuda_graph_config", Args())
    monkeypatch.setattr(plugin, "_model_has_index_topk", lambda args: False)
    assert run_step(fresh_status, "handle_cuda_graph_config", Args()) == ["built-in"]


def test_off_registers_nothing(monkeypatch, fresh_status):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN", "off")
    plugin.register()
    assert plugin.STATUS.state == "off"
    assert fresh_status._HOOKS == {}


def test_a_bad_value_of_the_switch_is_a_failure_not_a_guess(monkeypatch, fresh_status):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN", "maybe")
    plugin.register()
    assert plugin.STATUS.state == "failed"
    assert plugin.STATUS.error == "SGLANG_DSA_PLUGIN='maybe' is not allowed; use one of on, off"
    with pytest.raises(SystemExit) as stopped:
        run_step(fresh_status, "handle_deprecated_dp_attention", types.SimpleNamespace(attention_backend="dsa"))
    # One line, and no traceback.
    assert stopped.value.code == f"sglang-dsa-plugin: error: {plugin.STATUS.error}" == plugin.failure_message()


def test_what_is_broken_is_told_with_its_traceback(monkeypatch, fresh_status):
    monkeypatch.setitem(sys.modules, "sglang_dsa_plugin.adapter.hooks", None)
    plugin.register()
    assert plugin.STATUS.error.startswith("ModuleNotFoundError: ")
    assert plugin.STATUS.details.startswith("Traceback") and not plugin.STATUS.refused
