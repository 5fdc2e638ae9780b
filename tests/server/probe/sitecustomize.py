"""Put on PYTHONPATH of a server, and so of every process it starts: shows this package's log lines from the first
moment on, and makes the forwards of SGLang's own sparse attention raise.

It is on the side of the test, not of the package: the methods are replaced in the module that defines them, right after
that module has been executed, so a class that inherits one or a caller that reaches one fails loudly.
"""

import importlib.util
import logging
import os
import sys
import types

_ATTENTION = "sglang.srt.layers.attention."
# Every class and function that these modules define: backend, its mix-ins, indexers, selection.
GUARDED = {
    _ATTENTION + name
    for name in (
        "dsa_backend",
        "dsa.dsa_backend_kpool",
        "dsa.dsa_backend_mtp_precompute",
        "dsa.dsa_indexer",
        "dsa.dsa_indexer_kpool",
        "dsa.dsa_metadata_manager",
        "dsa.dsa_npu_indexer",
        "dsa.dsa_topk_backend",
    )
}
# Part of the model's own forward: it only gathers keys under context parallelism.
OF_THE_MODEL = {"prepare_kv_for_attention"}


def _raiser(name):
    def built_in(*_args, **_kwargs):
        raise AssertionError(f"SGLang's own {name} was called")

    return built_in


def guard(module):
    """Replace what runs in a guarded module; returns the names."""
    names = []
    for key, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__ or key in OF_THE_MODEL:
            continue
        if isinstance(value, types.FunctionType):
            setattr(module, key, _raiser(f"{module.__name__}.{key}"))
            names.append(key)
        elif isinstance(value, type):
            for method, function in list(vars(value).items()):
                if isinstance(function, types.FunctionType) and not method.startswith("__"):
                    setattr(value, method, _raiser(f"{key}.{method}"))
                    names.append(f"{key}.{method}")
    print(f"probe: guarded {len(names)} of {module.__name__} in process {os.getpid()}", file=sys.stderr, flush=True)
    return names


class _Finder:
    """Finds guarded modules as usual and guards them once they are executed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in GUARDED:
            return None
        GUARDED.discard(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            guard(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)

_shown = logging.StreamHandler(sys.stderr)
_shown.setFormatter(logging.Formatter("probe: %(message)s"))
logging.getLogger("sglang_dsa_plugin.adapter.plugin").addHandler(_shown)
logging.getLogger("sglang_dsa_plugin.adapter.plugin").setLevel(logging.INFO)
