"""A read of a damaged step leaves callbacks behind in Orbax's event loops."""

import gc
import pathlib

import pytest

# They find their loop closed when they come: noise on stderr, and not of our making.
_LEFT_BEHIND = (
    r"ignore:Exception ignored in. (None|<coroutine object _read_array)"
    ":pytest.PytestUnraisableExceptionWarning"
)


def pytest_collection_modifyitems(items):
    here = pathlib.Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(_LEFT_BEHIND))


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_for_other_tests():
    yield
    gc.collect()
