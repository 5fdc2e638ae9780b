"""The budget of index scores is taken out of what SGLang plans for the KV pool, on a GPU and for DSA models only."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang_dsa_plugin.adapter.hooks import kv_sizing

GIB = 1 << 30


@pytest.fixture
def planned(monkeypatch):
    """without_scores() on a server that SGLang finds 4 GiB for."""
    monkeypatch.delenv("SGLANG_DSA_PLUGIN_SCORES_MB", raising=False)
    monkeypatch.setattr(kv_sizing, "is_dsa_config", lambda config: config == "dsa")

    def plan(device="cuda", model="dsa", found=4 * GIB):
        configurator = SimpleNamespace(device=device, model_config=SimpleNamespace(hf_config=model))
        return kv_sizing.without_scores(lambda own, memory: found, configurator, 80.0)

    return plan


def test_the_default_and_the_users_budget(planned, monkeypatch):
    assert planned() == 4 * GIB - (512 << 20)
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_SCORES_MB", "100")
    assert planned() == 4 * GIB - (100 << 20)


def test_other_models_and_devices_are_left_alone(planned):
    assert planned(model="llama") == planned(device="cpu") == 4 * GIB


def test_a_budget_that_leaves_nothing_is_refused_by_name(planned, monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_SCORES_MB", "4096")
    with pytest.raises(ValueError, match="SGLANG_DSA_PLUGIN_SCORES_MB=4096 takes all of them; lower it"):
        planned()
