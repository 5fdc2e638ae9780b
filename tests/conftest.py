"""The default run leaves out the long forms and everything that needs a GPU."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Without -m: deselect `gpu`, and `full` unless --full is given. A -m expression is taken as it is."""
    if config.option.markexpr:
        return
    left_out = {"gpu"} if config.getoption("--full") else {"gpu", "full"}
    kept = [item for item in items if not left_out & {mark.name for mark in item.iter_markers()}]
    if len(kept) != len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
