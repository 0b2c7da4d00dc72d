"""A keeper in memory for the tests of the session."""

import pytest
from fake_run import FakeKeeper


@pytest.fixture
def keeper():
    return FakeKeeper()
