"""Tools that put a training run to the test."""

from . import inject as inject

__all__ = ["inject"]
