"""The errors that checkpoints raise, each with a text that says what to do next."""

from __future__ import annotations


class NotARunFolderError(ValueError):
    """A folder that is not empty and was not made by a `Keeper`; left as it was."""


class StructureError(ValueError):
    """The state asked for has other leaves than the state that was saved."""


class NoHealthyStepError(LookupError):
    """No step may be chosen without being asked for by number."""


class DamagedError(RuntimeError):
    """Bytes on disk are not the bytes that were saved."""


class UnreadableError(RuntimeError):
    """Bytes on disk could not be read, and nothing says that they have changed."""


class SaveFailedError(RuntimeError):
    """What should be on the disk is not: a step, a tag or the intent to go back."""
