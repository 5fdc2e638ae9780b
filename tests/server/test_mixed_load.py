"""Requests of all lengths at once, with shared prefixes and clients that leave; the large form is tests/gpu's."""

import pytest

from tests.server import load
from tests.server.specs import PLAIN

pytestmark = [pytest.mark.server, pytest.mark.parametrize("server", [PLAIN], indirect=True)]


def test_mixed_load(server):
    before = server.prefills()
    mixed = load.requests(32, 500)
    assert sum(request.leaves for request in mixed) == 2
    load.check(server, mixed, load.run(server, mixed, 8))
    after = server.prefills()
    # Both below and above k = 64 there were prompts, and each took its path.
    assert after["dense"] > before["dense"] and after["masked"] + after["sparse"] > before["masked"] + before["sparse"]
