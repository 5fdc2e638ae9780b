"""One server at a time: tests that use the same spec run one after another, whatever file they are in."""

import pytest
import torch

from tests.server.harness import GPU, ServerSlot


def pytest_collection_modifyitems(items):
    """Group the tests of this directory by their server, in the order in which the servers are first asked for."""
    places = [i for i, item in enumerate(items) if "server" in getattr(item, "fixturenames", ())]
    order: dict = {}
    for i in places:
        order.setdefault(items[i].callspec.params["server"], len(order))
    grouped = sorted((items[i] for i in places), key=lambda item: order[item.callspec.params["server"]])
    for i, item in zip(places, grouped):
        items[i] = item


@pytest.fixture(scope="session")
def slot(tmp_path_factory):
    # The oracle's matrices are small, and the server needs the cores too.
    torch.set_num_threads(1)
    slot = ServerSlot(tmp_path_factory.mktemp("server-logs"))
    yield slot
    slot.close()


@pytest.fixture
def server(request, slot):
    """The server of the test's spec: `@pytest.mark.parametrize("server", [SPEC], indirect=True)`."""
    if GPU and request.param.devices() > torch.cuda.device_count():
        pytest.skip(f"{request.param.name} wants {request.param.devices()} GPUs")
    running = slot.get(request.param)
    yield running
    assert running.alive(), f"{running.spec.name} died:\n{running.log()[-4000:]}"


def pytest_make_parametrize_id(val):
    name = getattr(val, "name", None)
    return name if isinstance(name, str) else None
