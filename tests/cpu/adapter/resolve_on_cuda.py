"""Prints, as JSON, what SGLang resolves its arguments to on a machine that claims to have one H200.

Only the questions that SGLang asks while it resolves arguments are answered; nothing is run on the device.
Argument: a JSON list of argument lists of the server. Each is resolved in a child of its own, forked after the imports
and after the plugins have been loaded; its line begins with RESOLVED.
"""

import dataclasses
import importlib.machinery
import json
import os
import sys
import traceback
import types
from unittest.mock import MagicMock

import torch

GIB = 1 << 30
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=141 * GIB, multi_processor_count=132, uuid="GPU-0"
)
ANSWERS = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": PROPERTIES.name,
    "get_device_capability": (9, 0),
    "get_device_properties": PROPERTIES,
    "mem_get_info": (140 * GIB, 141 * GIB),
    "memory_allocated": 0,
    "empty_cache": None,
    "set_device": None,
    "synchronize": None,
    "is_bf16_supported": True,
}


class Kernels:
    """Finds the kernel package, which needs a driver to load, as modules where every name exists."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return MagicMock(name=spec.name, __path__=[], __spec__=spec, __version__="1.0.0")

    def exec_module(self, module):
        pass


def claim_cuda():
    sys.meta_path.insert(0, Kernels())
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, lambda *_args, _answer=answer, **_kwargs: _answer)
    torch.version.cuda = torch.version.cuda or "12.9"


def resolve(args):
    """Every resolved argument and the platform's class."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.platforms import current_platform
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(args)
    server_args.resolve_once()
    view = resolving_view(server_args)
    fields = getattr(server_args, "__struct_fields__", None) or [f.name for f in dataclasses.fields(server_args)]
    platform = type(current_platform._resolve() if hasattr(current_platform, "_resolve") else current_platform)
    switches = {name: value for name, value in os.environ.items() if name.startswith("SGLANG_FORCE")}
    return {
        "platform": platform.__name__,
        "environment": switches,
        "args": {name: repr(getattr(view, name)) for name in fields},
    }


def main():
    claim_cuda()
    from sglang.srt.arg_groups.overrides import resolving_view  # noqa: F401
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args  # noqa: F401

    load_plugins()
    for args in json.loads(sys.argv[1]):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                print("RESOLVED " + json.dumps(resolve(args)), flush=True)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
