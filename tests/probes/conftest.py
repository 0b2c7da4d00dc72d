"""The suite has eight devices; programs on one of them are read as with one alone."""

import pytest

from stabil.probes import _shards


@pytest.fixture(autouse=True)
def one_device(request, monkeypatch):
    if "shard" not in request.node.name:
        monkeypatch.setattr(_shards, "devices", lambda: 1)
