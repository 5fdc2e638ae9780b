import subprocess
import sys

import pytest

from sglang_dsa_plugin import settings

READERS = {
    "enabled": settings.plugin_enabled,
    "index_keys": settings.index_keys,
    "scores_mb": settings.scores_budget_bytes,
    "impl": settings.forced_impl,
    "latent_layout": settings.latent_layout,
    "masked_prefill": settings.masked_prefill,
    "whole_prefill": settings.whole_prefill,
    "warmup": settings.prefill_warmup,
    "decode_threads": settings.decode_threads,
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for setting in settings.SETTINGS.values():
        monkeypatch.delenv(setting.env, raising=False)


def test_every_setting_has_a_reader():
    assert set(READERS) == set(settings.SETTINGS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enabled", True),
        ("index_keys", "auto"),
        ("scores_mb", 512 << 20),
        ("impl", None),
        ("latent_layout", "auto"),
        ("masked_prefill", "auto"),
        ("whole_prefill", True),
        ("warmup", "auto"),
        ("decode_threads", None),
    ],
)
@pytest.mark.parametrize("text", [None, "", "  "])
def test_default_when_unset_or_empty(monkeypatch, name, value, text):
    if text is not None:
        monkeypatch.setenv(settings.SETTINGS[name].env, text)
    assert READERS[name]() == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("enabled", "off", False),
        ("enabled", "on", True),
        ("index_keys", "fp8", "fp8"),
        ("index_keys", "model", "model"),
        ("scores_mb", "7", 7 << 20),
        ("scores_mb", " 33 ", 33 << 20),
        ("impl", "torch", "torch"),
        ("impl", "flashmla_kv2", "flashmla_kv2"),
        ("latent_layout", "fp8_576", "fp8_576"),
        ("latent_layout", "fp8_656", "fp8_656"),
        ("masked_prefill", "off", "off"),
        ("warmup", "on", "on"),
        ("decode_threads", "auto", None),
        ("decode_threads", "3", 3),
        ("scores_mb", "1048576", 1 << 40),
    ],
)
def test_value_is_read_at_the_call(monkeypatch, name, text, value):
    READERS[name]()
    monkeypatch.setenv(settings.SETTINGS[name].env, text)
    assert READERS[name]() == value


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("enabled", "0", "on, off"),
        ("enabled", "OFF", "on, off"),
        ("index_keys", "bf16", "auto, fp8, model"),
        ("scores_mb", "0", "positive whole number"),
        ("scores_mb", "-5", "positive whole number"),
        ("scores_mb", "1.5", "positive whole number"),
        ("scores_mb", "٣", "positive whole number"),
        ("scores_mb", "1048577", "at most 1048576"),
        ("scores_mb", "9" * 20, "at most 1048576"),
        ("decode_threads", "4097", "at most 4096"),
        ("impl", "torch,triton", "name of an implementation"),
        ("latent_layout", "bf16_1152", "auto, fp8_656, fp8_576"),
    ],
)
def test_bad_value_names_variable_value_and_allowed(monkeypatch, name, text, allowed):
    env = settings.SETTINGS[name].env
    monkeypatch.setenv(env, text)
    with pytest.raises(ValueError) as error:
        READERS[name]()
    assert f"{env}={text!r}" in str(error.value)
    assert allowed in str(error.value)
    with pytest.raises(ValueError, match=env):
        settings.table()


def test_table_shows_value_in_force(monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_SCORES_MB", "64")
    rows = {row["env"]: row for row in settings.table()}
    assert len(rows) == len(settings.SETTINGS)
    assert (rows["SGLANG_DSA_PLUGIN_SCORES_MB"]["value"], rows["SGLANG_DSA_PLUGIN_SCORES_MB"]["set"]) == ("64", "yes")
    assert (rows["SGLANG_DSA_PLUGIN"]["value"], rows["SGLANG_DSA_PLUGIN"]["set"]) == ("on", "no")
    assert all(row["doc"] and row["allowed"] for row in rows.values())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SGLANG_DSA_PLUGIN_SCOREMB", "SGLANG_DSA_PLUGIN_SCORES_MB, if that is meant"),
        ("SGLANG_DSA_PLUGIN_INDEXKEYS", "SGLANG_DSA_PLUGIN_INDEX_KEYS, if that is meant"),
        ("SGLANG_DSA_PLUGINS", "SGLANG_DSA_PLUGIN, if that is meant"),
        ("SGLANG_DSA_PLUGIN" + "_Q" * 30, "one of SGLANG_DSA_PLUGIN, SGLANG_DSA_PLUGIN_INDEX_KEYS, "),
    ],
)
def test_a_variable_that_is_none_of_ours_is_refused(monkeypatch, name, meant):
    settings.table()
    monkeypatch.setenv(name, "5")
    with pytest.raises(settings.BadSetting) as error:
        settings.table()
    assert str(error.value).startswith(f"{name} is no variable of sglang-dsa-plugin; use {meant}")
    assert str(error.value).endswith(", or unset it")


def test_imports_only_the_standard_library():
    heavy = "('torch', 'sglang', 'numpy')"
    code = f"import sys, sglang_dsa_plugin.settings; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
