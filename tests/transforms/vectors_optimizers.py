"""Replays recorded runs of the published spike-aware optimizers."""

from __future__ import annotations

from vectors_tools import Readers

READERS: Readers = {}
