"""Named moments between two changes on disk, at which a kill may fall.

Tests put a function in the place of `reached` that ends the process at one of them.
"""

from __future__ import annotations

SAVE = ("save_begun", "orbax_committed", "manifest_written", "retention_done")
ROLLBACK = (
    "intent_written",
    "save_settled",
    "batch_made",
    "step_set_aside",
    "half_made_gone",
    "intent_retired",
)
FILE = ("written_aside",)
REMOTE = ("remote_files_sent",)
DELETE = ("deletion_logged", "step_in_trash")


def reached(point: str) -> None:
    """Marks a named moment; does nothing itself."""
