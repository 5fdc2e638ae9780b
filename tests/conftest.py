"""The default run leaves out the long forms and everything that needs a GPU.

With workers (scripts/test.sh starts two), a file's tests stay with one, and whatever starts a server stays with one,
first, so that there is one server at a time and the rest goes on beside it. Servers of test_refusals.py end before they
load anything.
"""

import pytest


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


def _group(nodeid):
    file = nodeid.split("::")[0]
    return "server" if "server/" in file and not file.endswith("test_refusals.py") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        # Not --dist loadgroup: with pytest 9.2 it no longer groups (pytest-xdist issue 1386).
        def _split_scope(self, nodeid):
            return _group(nodeid)

    return ByGroup(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Without -m: deselect `gpu`, and `full` unless --full is given. A -m expression is taken as it is."""
    if hasattr(config, "workerinput"):
        # The longest first: a worker with a minute's work left keeps the other waiting.
        items.sort(key=lambda item: "server/" not in item.nodeid)
    if config.option.markexpr:
        return
    left_out = {"gpu"} if config.getoption("--full") else {"gpu", "full"}
    kept = [item for item in items if not left_out & {mark.name for mark in item.iter_markers()}]
    if len(kept) != len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
