"""Replays recorded runs of the published clipping and skipping codes."""

from __future__ import annotations

from vectors_tools import Readers

READERS: Readers = {}
