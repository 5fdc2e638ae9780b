"""The classes in place of SGLang's: nothing of its sparse attention is inherited, and a wrong class is seen."""

import importlib
import types

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from sglang_dsa_plugin.adapter import selfcheck
from sglang_dsa_plugin.adapter.indexer import DsaIndexer
from sglang_dsa_plugin.adapter.pool import DsaPool
from sglang_dsa_plugin.kernel_flags import Refusal

ATTENTION = "sglang.srt.layers.attention."
OURS = selfcheck.replacements()


def from_built_in_dsa(module: str) -> bool:
    return module == ATTENTION + "dsa_backend" or module.startswith(ATTENTION + "dsa.")


@pytest.mark.parametrize("target", OURS)
def test_no_built_in_class_in_the_mro(target):
    ours = OURS[target]
    assert not [c for c in ours.__mro__ if from_built_in_dsa(c.__module__)]
    # Nor a borrowed method.
    borrowed = [n for n in dir(ours) if from_built_in_dsa(str(getattr(getattr(ours, n), "__module__", "")))]
    assert not borrowed


@pytest.mark.parametrize("target", OURS)
def test_the_rule_sees_the_built_in(target):
    module, _, name = target.rpartition(".")
    built_in = getattr(importlib.import_module(ATTENTION + module), name)
    assert built_in not in OURS.values()
    assert [c for c in built_in.__mro__ if from_built_in_dsa(c.__module__)]


def test_the_pool_is_sglangs_with_our_writes():
    """SGLang tests the pool's type, so the pool alone is a subclass; what reads and writes rows is ours."""
    assert issubclass(DsaPool, DSATokenToKVPool)
    for name in ("set_kv_buffer", "_write_mla_kv_buffer", "get_mla_kv_buffer", "move_kv_cache", "get_cpu_copy"):
        assert name in vars(DsaPool), name


def test_classes_not_replaced_are_named(monkeypatch):
    """In this process nothing is hooked, as when SGLang could not apply a hook and only logged it."""
    wrong = selfcheck.wrong_classes()
    for target in OURS:
        assert any(f"{ATTENTION}{target} is {ATTENTION}" in line for line in wrong)
    with pytest.raises(Refusal, match=r"would not be in use: .*DeepseekSparseAttnBackend"):
        selfcheck.require_classes()
    for target, ours in OURS.items():
        module, _, name = target.rpartition(".")
        monkeypatch.setattr(importlib.import_module(ATTENTION + module), name, ours)
    assert [line for line in selfcheck.wrong_classes() if "KV pool" not in line] == []


@pytest.mark.parametrize(
    ("layer", "indexer", "problem"),
    [
        (0, DsaIndexer.__new__(DsaIndexer), None),
        (0, torch.nn.Linear(1, 1), "layer 0 has Linear where DsaIndexer belongs"),
        (0, None, "layer 0 has NoneType where DsaIndexer belongs"),
        (1, None, None),
        (1, torch.nn.Linear(1, 1), "layer 1 reuses picks but built Linear"),
    ],
)
def test_each_layers_indexer_is_checked(layer, indexer, problem):
    config = types.SimpleNamespace(layer_reuses_picks=lambda number: number == 1)
    part = types.SimpleNamespace(layer_id=layer, indexer=indexer)
    assert selfcheck._layer_problem(part, config) == problem
