"""The judge of the live capture passes what is right and fails what is not (tests/server/capture.py)."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.backend import core, dense_fallback, metadata
from sglang_dsa_plugin.cache.layouts import FP8, LATENT_LAYOUTS
from sglang_dsa_plugin.ops import dense_mha, index_select, quant, sparse_mla
from tests.cpu.ops import indexer_inputs
from tests.server import capture

K, HEADS, LENGTHS = 64, 4, [5, 64, 65, 200, 130, 90, 256, 31, 250, 77]


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """live_capture.py, writing to tmp_path; what it wraps is put back afterwards."""
    for module, name in ((sparse_mla, "sparse_mla"), (dense_mha, "dense_mha"), (index_select, "paged")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(support, "choose", support.choose)
    monkeypatch.setenv("DSA_TEST_CAPTURE", str(tmp_path))
    spec = importlib.util.spec_from_file_location("live_capture", Path(capture.PROBE) / "live_capture.py")
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "live_capture", loaded)
    spec.loader.exec_module(loaded)
    return loaded


def mode(name):
    return types.SimpleNamespace(forward_mode=types.SimpleNamespace(is_decode=lambda: name == "decode"))


class Backend:
    """What the probe wraps of DsaBackend."""

    def __init__(self, step, rows, layout):
        self.forward_metadata, self.rows, self.core = step, rows, core.AttentionCore(LATENT_LAYOUTS[layout])

    def _sparse(self, q, k, layer, forward_batch, save_kv_cache, *, topk_indices):
        return self.core.sparse(q[..., :512], q[..., 512:], self.rows, topk_indices, self.forward_metadata, 192**-0.5)

    def forward_extend(self, q, k, v, layer):
        return self.core.expanded(q, k, v, self.forward_metadata, 192**-0.5)


class Indexer:
    """What the probe wraps of DsaIndexer."""

    layer_id = 2

    def __init__(self, inputs, step):
        self.inputs, self.step = inputs, step

    def forward(self, forward_batch=None):
        return self._store_and_pick(self.step, decode=True)

    def _store_and_pick(self, step, decode):
        return index_select.paged(
            self.inputs.q, self.inputs.pages, self.inputs.gate, step.lengths, step.page_table, step.row_to_request, K
        )


@pytest.mark.parametrize(("layout", "keys"), [("fp8_656", FP8), ("bf16_1152", torch.bfloat16), ("fp8_576", FP8)])
def test_a_step_is_captured_and_judged(probe, tmp_path, layout, keys):
    inputs = indexer_inputs.normal(len(LENGTHS), 16, 64 * 40, keys)
    slots = torch.arange(64 * 40).view(len(LENGTHS), -1)
    step = metadata.decode_step(
        slots, torch.arange(len(LENGTHS)), torch.tensor(LENGTHS), max(LENGTHS), dense_fallback.SPARSE_DECODE
    )
    g = indexer_inputs.generator(3)
    rows = quant.quantize_latent(torch.randn(64 * 40, 512, generator=g), torch.randn(64 * 40, 64, generator=g), layout)
    q = torch.randn(len(LENGTHS), HEADS, 576, generator=g).bfloat16()
    probe.hook_backend(types.SimpleNamespace(DsaBackend=Backend))
    probe.hook_indexer(types.SimpleNamespace(DsaIndexer=Indexer))
    backend, indexer = Backend(step, rows, layout), Indexer(inputs, step)
    picks = indexer.forward(forward_batch=mode("decode"))
    with capture.capturing(tmp_path):
        indexer.forward(forward_batch=mode("decode"))
        backend._sparse(q, None, types.SimpleNamespace(layer_id=1), mode("decode"), False, topk_indices=picks)
        step.cu_queries = step.cu_keys = torch.tensor([0, 4, len(LENGTHS)], dtype=torch.int32)
        step.decision = dense_fallback.Decision("dense", "a test")
        backend.forward_extend(q[..., :192], q[..., :192], q[..., :128], types.SimpleNamespace(layer_id=0))
    backend.forward_extend(q[..., :192], q[..., :192], q[..., :128], types.SimpleNamespace(layer_id=0))
    report = capture.judge(tmp_path)
    assert {key: dict(layers) for key, layers in report.calls.items()} == {
        ("paged", "decode"): {2: 1},
        ("sparse_mla", "decode"): {1: 1},
        ("dense_mha", "prefill"): {0: 1},
    }
    assert (
        report.recall > 0.99
        and report.exact
        and report.chosen
        == {
            "sparse_mla=numba",
            "dense_mha=torch",
            "paged=torch",
        }
    )
    for path in sorted(tmp_path.glob("*.pt")):
        for name, change in CHANGES[torch.load(path)["operator"]].items():
            kept = torch.load(path)
            torch.save(kept | {name: change(kept)}, path)
            with pytest.raises(AssertionError, match=kept["operator"]):
                capture.judge(tmp_path)
            torch.save(kept, path)


def _other_slot(call):
    """The last row, which picks k of many, with one of its rows replaced by its neighbour."""
    slots = call["slots"].clone()
    slots[-1, 0] = slots[-1, 1]
    return slots


def _one_less(call):
    picks = call["picks"].clone()
    picks[4, 3] = picks[4, 2]
    return picks


CHANGES = {
    "sparse_mla": {
        "out": lambda call: call["out"] * 1.05,
        "lse": lambda call: call["lse"] + 1e-3,
        "slots": _other_slot,
        "pool_slots": lambda call: call["pool_slots"].flip(0),
        "picks": _one_less,
    },
    "dense_mha": {"out": lambda call: call["out"].flip(0), "scale": lambda call: call["scale"] * 1.02},
    "paged": {
        "picks": _one_less,
        "scores": lambda call: call["scores"] * 1.01,
        "gate": lambda call: call["gate"] * 0.99,
    },
}
