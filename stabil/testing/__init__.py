"""Tools that put a training run to the test."""

from stabil.testing import inject as inject

__all__ = ["inject"]
