"""Put on PYTHONPATH of a server, and so of every process it starts: writes what attention and selection were given and
what they answered (live_capture.py) whenever the file `on` lies in the directory that DSA_TEST_CAPTURE names.

It is on the side of the test, not of the package: the two classes that know the layer are wrapped right after their
module has been executed, and the operators where the package looks them up.
"""

import importlib.util
import sys

HOOKS = {
    "sglang_dsa_plugin.adapter.backend": "hook_backend",
    "sglang_dsa_plugin.adapter.indexer": "hook_indexer",
}


class _Finder:
    """Finds hooked modules as usual and hooks them once they are executed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in HOOKS:
            return None
        hook = HOOKS.pop(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            import live_capture

            getattr(live_capture, hook)(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
