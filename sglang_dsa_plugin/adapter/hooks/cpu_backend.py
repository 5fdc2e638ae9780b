"""On a CPU a DSA model gets the "dsa" backend without a flag, more ranks than NUMA nodes get cores, nothing is
compiled.

Why: SGLang's CPU step fills in intel_amx before the model is looked at, so the automatic "dsa" never fires; and tensor
or pipeline parallelism on one NUMA node stops at an assertion unless SGLANG_CPU_OMP_THREADS_BIND is set. The router's
top-k is under torch.compile, which spends 20 to 50 seconds of the first start in a C++ compiler for a few microseconds
a step. Upstream: arg_groups/platform_hook.py handle_cpu_backends; utils/numa_utils.py init_threads_binding;
layers/moe/topk.py. Can go: when the CPU step leaves the attention backend of out-of-tree platforms alone and binding
divides a node's cores itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

from sglang_dsa_plugin.adapter.hooks.arguments import SOURCE, hf_config_of
from sglang_dsa_plugin.config import is_dsa_config

logger = logging.getLogger(__name__)
BIND = "SGLANG_CPU_OMP_THREADS_BIND"
COMPILE = "TORCH_COMPILE_DISABLE"


def register() -> None:
    """Queue the step hook where the CPU platform is ours."""
    from sglang_dsa_plugin.adapter.platform import CPU_PLATFORM, activate

    if activate() != CPU_PLATFORM:
        return
    register_resolution_hook("handle_cpu_backends")(choose_backend)


def choose_backend(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Declare "dsa" ahead of the built-in step, which then keeps it; compile nothing; bind threads."""
    cfg = resolving_view(server_args)
    if cfg.device == "cpu":
        config = hf_config_of(server_args)
        if config is not None and is_dsa_config(config):
            # Also for a phase left unsaid; what is said of another backend is refused in arguments.py.
            if cfg.attention_backend is None:
                declare_resolution(server_args, SOURCE, attention_backend="dsa")
            # Inherited by the processes started later, which read it when they import torch.
            os.environ.setdefault(COMPILE, "1")
        bind_threads(cfg.tp_size * cfg.pp_size * cfg.dp_size)
    previous(server_args)


def bind_threads(ranks: int) -> None:
    """Set SGLANG_CPU_OMP_THREADS_BIND when there are more ranks than NUMA nodes and the user has not set it.

    Cores are dealt out in equal runs; with more ranks than cores each rank shares a core.
    """
    from sglang.srt.utils.numa_utils import get_cpu_ids_by_node

    if os.environ.get(BIND) or ranks <= len(get_cpu_ids_by_node()):
        return
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    groups = [cores[(rank * each) % len(cores) :][:each] for rank in range(ranks)]
    os.environ[BIND] = "|".join(",".join(map(str, group)) for group in groups)
    logger.info("%s=%s: %d ranks share %d cores", BIND, os.environ[BIND], ranks, len(cores))
