"""The data of `stabil demo`: the source files of Python's own standard library."""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig

import numpy as np

from stabil.cli._demo_model import Size


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to learn from, and bytes held out.

    Attributes:
      train: uint8 `[bytes]`, the files in sorted order, one after the other.
      held_out: uint8 `[bytes]`, every twentieth file.
      files: number of files read.
    """

    train: np.ndarray
    held_out: np.ndarray
    files: int


def read_corpus(folder: str | pathlib.Path | None = None) -> Corpus:
    """Reads the `.py` files at the top of the standard library, in sorted order.

    Args:
      folder: read the files of this folder instead.

    Returns:
      A `Corpus`.

    Raises:
      FileNotFoundError: the folder holds fewer than twenty such files.
    """
    folder = pathlib.Path(folder or sysconfig.get_paths()["stdlib"])
    paths = sorted(folder.glob("*.py"))
    if len(paths) < 20:
        raise FileNotFoundError(
            f"needed at least 20 .py files of Python's standard library to train on, "
            f"got {len(paths)} in {folder}; run the demo with a Python that ships its "
            "sources, for example one from python.org or your distribution"
        )
    texts = [path.read_bytes() for path in paths]
    held_out = b"".join(texts[::20])
    train = b"".join(text for i, text in enumerate(texts) if i % 20)
    return Corpus(
        np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), len(paths)
    )


def batch_at(corpus: Corpus, size: Size, seed: int, position: int) -> dict:
    """The batch at one position of the data; the same one whenever it is asked for.

    Returns:
      `tokens`, uint8 `[batch, context + 1]`, and `position`, int32 scalar.
    """
    draw = np.random.default_rng((seed, position))
    return {
        "tokens": _windows(corpus.train, draw, size),
        "position": np.asarray(position, np.int32),
    }


def held_out_batches(corpus: Corpus, size: Size, number: int = 32) -> np.ndarray:
    """Fixed held-out batches, uint8 `[number, batch, context + 1]`, for any seed."""
    draw = np.random.default_rng(0)
    return np.stack([_windows(corpus.held_out, draw, size) for _ in range(number)])


def _windows(text: np.ndarray, draw: np.random.Generator, size: Size) -> np.ndarray:
    starts = draw.integers(0, len(text) - size.context - 1, size.batch)
    return text[starts[:, None] + np.arange(size.context + 1)]
