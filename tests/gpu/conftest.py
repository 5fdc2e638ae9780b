"""Tests of running servers here are named and grouped by their server, as those of tests/server are."""

from tests.server.conftest import pytest_collection_modifyitems, pytest_make_parametrize_id  # noqa: F401
