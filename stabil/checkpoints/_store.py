"""The only module that talks to Orbax: one folder in, one folder out.

A step is written by `save_checkpointables_async` and read by `load_checkpointables`,
not through `training.Checkpointer`: stabil decides when to save and what to keep, and
a Checkpointer's own list of steps goes wrong after a failed save (good steps are
forgotten) and after a rollback (saves are skipped without a word). What is on disk is
the same: a `Checkpointer` or a `CheckpointManager` opened on the folder sees the steps.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import warnings
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as v0
from etils import epath
from orbax.checkpoint import v1 as ocp

from stabil.checkpoints import _leaves
from stabil.checkpoints._errors import DamagedError

# The name under which Orbax keeps the state inside a step's folder.
STATE = "state"
# Part of the name of a folder that Orbax has not committed.
UNCOMMITTED = ".orbax-checkpoint-tmp"


def _context(compress: bool) -> ocp.Context:
    context = ocp.Context()
    context.array.saving.use_compression = compress
    return context


def save(
    path: pathlib.Path, tree: Any, *, compress: bool, save_id: str
) -> Callable[[], None]:
    """Begins to write a state; its arrays may be donated or changed afterwards.

    Args:
      path: the step's folder, which must not exist.
      tree: pytree of what `_leaves.to_disk` gives.
      compress: whether arrays are compressed with zstd.
      save_id: kept in Orbax's own metadata.
    Returns:
      A function that waits until the folder is there, and raises what went wrong.
    """
    with _context(compress):
        response = ocp.save_checkpointables_async(
            str(path), {STATE: tree}, custom_metadata={"stabil_save_id": save_id}
        )
    return response.result


def load(path: pathlib.Path, abstract: Any) -> Any:
    """Reads a state.

    Raises:
      DamagedError: Orbax could not read it; names the innermost cause, because the
        outermost prints the whole tree.
    """
    with _no_abandoned_coroutines():
        try:
            return ocp.load_checkpointables(str(path), {STATE: abstract})[STATE]
        except Exception as error:
            problem = _innermost(error)
        gc.collect()
    raise DamagedError(f"{path} cannot be read: {problem}")


@contextlib.contextmanager
def _no_abandoned_coroutines() -> Generator[None]:
    # A read that fails leaves coroutines behind, and Python warns of each.
    with warnings.catch_warnings():
        text = "coroutine .* was never awaited"
        warnings.filterwarnings("ignore", text, RuntimeWarning)
        yield


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {text}"


def load_plain(path: pathlib.Path) -> Any:
    """Reads a state without knowing its structure: NumPy arrays in dicts and lists.

    Raises:
      DamagedError: Orbax could not read it.
    """

    def abstract(leaf: Any) -> Any:
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            return leaf
        return np.broadcast_to(np.zeros([], dtype), shape)

    problem, metadata = "no metadata", None
    with _no_abandoned_coroutines():
        try:
            metadata = ocp.checkpointables_metadata(str(path)).metadata[STATE]
        except Exception as error:
            problem = _innermost(error)
        gc.collect()
    if metadata is None:
        raise DamagedError(f"{path} cannot be read: {problem}")
    return load(path, jax.tree.map(abstract, metadata))


def load_foreign(item: pathlib.Path) -> Any:
    """Reads an item that any Orbax since 0.5 wrote: NumPy arrays in dicts and lists.

    Args:
      item: the folder that holds `_METADATA`.
    Raises:
      DamagedError: Orbax could not read it.
    """
    with _no_abandoned_coroutines():
        try:
            place, reader = epath.Path(item), v0.PyTreeCheckpointHandler()
            as_arrays = jax.tree.map(
                lambda _: v0.RestoreArgs(restore_type=np.ndarray),
                reader.metadata(place).tree,
            )
            arguments = v0.args.PyTreeRestore(restore_args=as_arrays)
            return reader.restore(place, args=arguments)
        except Exception as error:
            problem = _innermost(error)
        gc.collect()
    raise DamagedError(f"{item} cannot be read: {problem}")


def read(path: pathlib.Path, saved: list[_leaves.Leaf], abstract_state: Any) -> Any:
    """Reads a state into the structure and the shardings of `abstract_state`.

    Returns:
      The values as they are on disk, in the order of `saved`, and as they were wanted,
      in the structure of `abstract_state`.
    """
    leaves, values, treedef = _leaves.flatten(abstract_state)
    by_path = {leaf.path: leaf for leaf in saved}
    order = [by_path[leaf.path] for leaf in leaves]
    asked = [_leaves.for_disk(x, v) for x, v in zip(order, values, strict=True)]
    tree = load(path, jax.tree.unflatten(treedef, asked))
    found = dict(
        zip(
            (leaf.path for leaf in order if leaf.kind != "empty"),
            jax.tree.leaves(tree),
            strict=True,
        )
    )
    raw = [found.get(leaf.path) for leaf in saved]
    restored = [
        _leaves.from_disk(x, v, found.get(x.path))
        for x, v in zip(order, values, strict=True)
    ]
    return raw, jax.tree.unflatten(treedef, restored)
