"""SGLang's own test kit for DSA attention, run against this package's backend and pool: a line a case, then the sums.

    python -m tests.gpu.sglang_kit [--device cuda] [--json out.json]

The kit (sglang.test.kits.attention_unittest, in SGLang's wheel) builds a small backend by its name in SGLang's registry
and compares one layer with a float32 reference. The plugin is loaded first, so that name gives this package's class,
which is checked. The kit makes the pool by a class of its own module: ours is put in its place, and its config gets the
keys that a real model has.

A case is "passed", "failed" or "not applicable". The last is what the kit skips here, what this package refuses by name
(the message is the reason), and WHY_NOT below.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The kit's sparse prefill is absorbed; on a CPU this package would run it over expanded keys.
os.environ.setdefault("SGLANG_DSA_PLUGIN_MASKED_PREFILL", "off")

import torch

PACKAGE = "sglang.test.kits.attention_unittest"
# Parts of the kit that ask for what this package does not do at all.
WHY_NOT = {
    "run_dsa_mtp_seed_handoff_case": "batch-global picks of the built-in's fused top-k, carried to a draft model; "
    "picks here are positions in the request, and speculative decoding is refused by name",
    "run_dsa_eagle_draft_cuda_graph_runner_case": "speculative decoding is refused by name",
    "split_op_runner (dense fallback)": "prefill is never captured: dense or sparse is chosen batch by batch",
}


@dataclasses.dataclass
class Outcome:
    """What became of a case. state: "passed", "failed" or "not applicable"."""

    case: str
    state: str
    reason: str = ""


def prepare() -> Any:
    """Load the plugin, then the kit's module with our pool and a complete config in it; returns the module.

    Raises RuntimeError where SGLang's registry would still build another backend.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import importlib

    kit = importlib.import_module(f"{PACKAGE}.attention_methods.dsa_attention")
    from sglang_dsa_plugin.adapter import selfcheck, state
    from sglang_dsa_plugin.adapter.pool import DsaPool
    from sglang_dsa_plugin.kernel_flags import DECLARED

    selfcheck.require_classes()
    state.set_model_dtype(torch.bfloat16)
    # The kit starts no process groups and states only what the built-in backend asks of them.
    from sglang.srt.runtime_context import get_parallel

    one_rank = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_tp_size=1, attn_tp_rank=0)
    one_rank.__enter__()
    kit.one_rank = one_rank  # kept, or it would end here

    class KitPool(DsaPool):
        def __init__(self, **sizes: Any) -> None:
            # Dense cases hand keys in and store nothing, so their pool may have rows of any size.
            if sizes["kv_lora_rank"] != 512:
                sizes |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "kv_cache_dim": 576}
            super().__init__(**sizes)

    tiny = kit.TinyDSAModelConfig

    class CompleteConfig(tiny):
        def __init__(self, **sizes: Any) -> None:
            super().__init__(**sizes)
            config = self.hf_config
            config.kv_lora_rank, config.qk_rope_head_dim = 512, 64
            config.q_lora_rank, config.v_head_dim = 64, self.v_head_dim
            config.max_position_embeddings, config.rope_theta = self.context_len, 10_000.0

    class KitRunner(kit.DSAMockModelRunner):
        # Whether the kernels that the kit names are asked for; else what the plugin declares without a flag.
        as_named = False

        def __init__(self, **given: Any) -> None:
            if not self.as_named:
                given |= {"dsa_prefill_backend": DECLARED, "dsa_decode_backend": DECLARED}
            super().__init__(**given)
            # The kit runs one layer without a model; the backend goes through a model's indexers and threads.
            self.model = torch.nn.Module()

    kit.DSATokenToKVPool, kit.TinyDSAModelConfig, kit.DSAMockModelRunner = KitPool, CompleteConfig, KitRunner
    return kit


def cases(kit: Any, device: str) -> Iterator[tuple[str, Callable[[unittest.TestCase], None]]]:
    """(name, call with a unittest.TestCase) of every case that can be asked for."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    on = {"device": device}
    for layout in ("contiguous", "shuffled_pages", "interleaved_pages"):
        for case in kit.make_dsa_dense_fallback_cases("dsa"):
            yield (
                f"dense/{layout}/{case.name}",
                lambda t, c=case, y=layout: kit.run_dsa_attention_case(t, c, loc_layout=y, **on),
            )
        for pattern in ("trailing", "strided", "head_tail"):
            for case in kit.make_dsa_sparse_cases("dsa"):
                yield (
                    f"sparse/{layout}/{pattern}/{case.name}",
                    lambda t, c=case, y=layout, p=pattern: kit.run_dsa_sparse_attention_case(
                        t, c, loc_layout=y, index_pattern=p, **on
                    ),
                )
    for case in kit.make_dsa_sparse_cases("dsa"):
        yield (
            f"sparse fp8/{case.name}",
            lambda t, c=case: kit.run_dsa_sparse_attention_case(t, c, fp8_kv_cache=True, **on),
        )
        long = dict(index_topk=kit.DSA_SPARSE_TILELANG_INDEX_TOPK, **on)
        yield (
            f"sparse k=2048/{case.name}",
            lambda t, c=case, m=long: kit.run_dsa_sparse_attention_case(t, c, **m),
        )
        if case.forward_mode.is_decode():
            for fp8 in (False, True):
                yield (
                    f"decode in a graph{' fp8' * fp8}/{case.name}",
                    lambda t, c=case, f=fp8: _in_a_graph(t, c, f, device),
                )
    if device != "cpu":
        yield from _named_kernels(kit, device)
    verify = dataclasses.replace(
        next(c for c in kit.make_dsa_sparse_cases("dsa") if c.forward_mode.is_decode()),
        name="verify of draft tokens", forward_mode=ForwardMode.TARGET_VERIFY, extend_lens=(2, 2),
    )  # fmt: skip
    yield "speculative/verify", lambda t: kit.run_dsa_sparse_speculative_forward_mode_case(t, verify, **on)


def _named_kernels(kit: Any, device: str) -> Iterator[tuple[str, Callable[[unittest.TestCase], None]]]:
    """A prefill and a decode case under each kernel that the kit knows by name, as the flags would ask for it."""
    prefill = next(c for c in kit.make_dsa_sparse_cases("dsa") if not c.forward_mode.is_decode())
    decode = next(c for c in kit.make_dsa_sparse_cases("dsa") if c.forward_mode.is_decode())

    def as_named(run_case: Callable, case: Any, name: str) -> Callable[[unittest.TestCase], None]:
        def call(testcase: unittest.TestCase) -> None:
            kit.DSAMockModelRunner.as_named = True
            try:
                run_case(testcase, case, name, device=device)
            finally:
                kit.DSAMockModelRunner.as_named = False

        return call

    for name in kit.DSA_PREFILL_IMPL_VARIANTS:
        yield f"prefill by {name}", as_named(kit.run_dsa_sparse_prefill_impl_variant_case, prefill, name)
    for name in kit.DSA_DECODE_IMPL_VARIANTS:
        yield f"decode by {name}", as_named(kit.run_dsa_sparse_decode_impl_variant_case, decode, name)


def _in_a_graph(testcase: unittest.TestCase, case: Any, fp8: bool, device: str) -> None:
    if device == "cpu":
        testcase.skipTest("no CUDA graph on a CPU")
    from importlib import import_module

    runner = import_module(f"{PACKAGE}.runner_modes.cuda_graph_decode_runner")
    runner.run_dsa_sparse_cuda_graph_decode_case(testcase, case, fp8_kv_cache=fp8, device=device)


def run(name: str, call: Callable[[unittest.TestCase], None]) -> Outcome:
    """Run one case."""
    from sglang_dsa_plugin import plan
    from sglang_dsa_plugin.config import UnsupportedModel

    try:
        call(unittest.TestCase())
    except unittest.SkipTest as skipped:
        return Outcome(name, "not applicable", f"skipped by the kit: {skipped}")
    except (NotImplementedError, plan.Refusal, UnsupportedModel) as refused:
        return Outcome(name, "not applicable", f"refused: {refused}")
    except Exception as error:
        return Outcome(name, "failed", f"{type(error).__name__}: {error}")
    return Outcome(name, "passed")


def main() -> int:
    """Run everything; exit code 1 when a case failed or none passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    asked = parser.parse_args()
    kit = prepare()
    found = []
    for name, call in cases(kit, asked.device):
        if asked.only in name:
            found.append(run(name, call))
            print(f"{found[-1].state:14} {name} {found[-1].reason[:600]}".rstrip(), flush=True)
    found += [Outcome(name, "not applicable", reason) for name, reason in WHY_NOT.items()]
    for outcome in found[-len(WHY_NOT) :]:
        print(f"{outcome.state:14} {outcome.case} {outcome.reason}")
    sums = {state: sum(o.state == state for o in found) for state in ("passed", "failed", "not applicable")}
    print(", ".join(f"{count} {state}" for state, count in sums.items()))
    if asked.json:
        asked.json.write_text(json.dumps([dataclasses.asdict(o) for o in found], indent=1) + "\n")
    return int(sums["failed"] > 0 or not sums["passed"])


if __name__ == "__main__":
    sys.exit(main())
