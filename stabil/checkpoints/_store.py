"""The only module that talks to Orbax: one folder in, one folder out.

A step is written by an `AsyncCheckpointer` of its own and not through a manager of
steps, v0's `CheckpointManager` or v1's `training.Checkpointer`: stabil decides when to
save and what to keep, and their own list of steps goes wrong after a failed save (good
steps are forgotten) and after a rollback (saves are skipped without a word). What is on
disk is the same: either manager opened on the folder sees the steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import itertools
import math
import pathlib
import warnings
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as v0
from etils import epath

from stabil.checkpoints import _leaves
from stabil.checkpoints._errors import DamagedError, UnreadableError

# The name under which Orbax keeps the state inside a step's folder.
STATE = "state"
# Part of the name of a folder that Orbax has not committed.
UNCOMMITTED = ".orbax-checkpoint-tmp"
# Causes that changed bytes seldom have. All else may be damage.
_BY_PROGRAM = (AttributeError, ImportError, MemoryError, NameError, TypeError)
# Arrays are read in so many groups of at least so many bytes: a group costs as much as
# Orbax takes to read its metadata.
_GROUPS = 8
_SMALLEST_GROUP = 64 << 20


def save(
    path: pathlib.Path, tree: Any, *, compress: bool, save_id: str
) -> Callable[[], None]:
    """Begins to write a state; its arrays may be donated or changed afterwards.

    By the writer below `save_checkpointables_async`, which keeps the train loop a third
    shorter.

    Args:
      path: the step's folder, which must not exist.
      tree: pytree of what `_leaves.to_disk` gives.
      compress: whether arrays are compressed with zstd.
      save_id: kept in Orbax's own metadata.
    Returns:
      A function that waits until the folder is there, and raises what went wrong.
    """
    item = v0.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, use_compression=compress
    )
    writer = v0.AsyncCheckpointer(v0.CompositeCheckpointHandler(**{STATE: item}))
    try:
        writer.save(
            epath.Path(path),
            args=v0.args.Composite(**{STATE: v0.args.PyTreeSave(tree)}),
            custom_metadata={"stabil_save_id": save_id},
        )
    except BaseException:
        writer.close()
        raise

    def wait() -> None:
        try:
            writer.wait_until_finished()
        finally:
            writer.close()

    return wait


def load(
    path: pathlib.Path, abstract: Any, arrived: Callable[[list[jax.Array]], None]
) -> Any:
    """Reads a state.

    By the reader below `load_checkpointables`, which has half of its fixed cost.

    Args:
      path: the step's folder.
      abstract: pytree of what `_leaves.for_disk` gives.
      arrived: is shown the arrays that are there while others are still being read.
    Raises:
      DamagedError: Orbax could not read it; names the innermost cause, because the
        outermost prints the whole tree.
      UnreadableError: the same, and the cause looks like that of a program.
    """
    arguments = v0.args.PyTreeRestore(
        item=abstract, restore_args=jax.tree.map(_restore_args, abstract)
    )
    return _read_item(path / STATE, lambda _: arguments, _Registry(arrived))


def _in_groups(handler: Any, arrived: Callable[[list[jax.Array]], None]) -> Any:
    """Orbax's handler of arrays, which shows a group of them as soon as it is there."""
    grouping = copy.copy(handler)

    async def deserialize(infos: Any, args: Any) -> list[jax.Array]:
        async def read(group: slice) -> list[jax.Array]:
            arrays = list(await handler.deserialize(infos[group], args[group]))
            arrived(arrays)
            return arrays

        found = await asyncio.gather(*map(read, _groups(args)))
        return [array for group in found for array in group]

    grouping.deserialize = deserialize
    return grouping


def _groups(args: Any) -> list[slice]:
    """Cuts arrays that follow each other into at most `_GROUPS` of about one size."""
    sizes = [math.prod(a.global_shape) * a.dtype.itemsize for a in args]
    ends = np.cumsum(sizes)
    share = max(ends[-1] / _GROUPS, _SMALLEST_GROUP)
    cuts = np.flatnonzero(np.diff(ends // share)) + 1
    bounds = [0, *cuts.tolist(), len(args)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


class _Registry:
    """Orbax's own handlers, but that of JAX's arrays in groups."""

    def __init__(self, arrived: Callable[[list[jax.Array]], None]):
        self._usual = v0.type_handlers.get_type_handler(jax.Array)
        self._grouping = _in_groups(self._usual, arrived)

    def get(self, kind: Any) -> Any:
        found = v0.type_handlers.get_type_handler(kind)
        return self._grouping if found is self._usual else found

    def has(self, kind: Any) -> bool:
        return v0.type_handlers.has_type_handler(kind)


def _restore_args(leaf: Any) -> v0.RestoreArgs:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return v0.ArrayRestoreArgs(
            restore_type=jax.Array,
            sharding=leaf.sharding,
            global_shape=leaf.shape,
            dtype=leaf.dtype,
        )
    return v0.RestoreArgs(restore_type=type(leaf))


def _read_item(
    item: pathlib.Path,
    arguments: Callable[[v0.PyTreeCheckpointHandler], v0.args.PyTreeRestore],
    registry: Any = None,
) -> Any:
    def read() -> Any:
        own = {} if registry is None else {"type_handler_registry": registry}
        reader = v0.PyTreeCheckpointHandler(**own)
        return reader.restore(epath.Path(item), args=arguments(reader))

    with _no_abandoned_coroutines():
        try:
            return read()
        except Exception as error:
            inner = _innermost(error)
            problem, by_program = _told(inner), _is_by_program(inner)
            del inner
        # The reader is gone, and with it all that still refers to the coroutines.
        gc.collect()
    kind = UnreadableError if by_program else DamagedError
    raise kind(f"{item} cannot be read: {problem}")


@contextlib.contextmanager
def _no_abandoned_coroutines() -> Generator[None]:
    # A read that fails leaves coroutines behind, and Python warns of each.
    with warnings.catch_warnings():
        text = "coroutine .* was never awaited"
        warnings.filterwarnings("ignore", text, RuntimeWarning)
        yield


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _told(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {text}"


def _is_by_program(error: BaseException) -> bool:
    """Whether it looks like too little memory, or another version of a library."""
    return isinstance(error, _BY_PROGRAM) or "RESOURCE_EXHAUSTED" in str(error)


def load_foreign(item: pathlib.Path) -> Any:
    """Reads what any Orbax since 0.5 wrote, its structure unknown.

    Args:
      item: the folder that holds `_METADATA`.
    Returns:
      NumPy arrays, and texts, in dicts and lists.
    Raises:
      DamagedError: Orbax could not read it.
      UnreadableError: the same, and the cause looks like that of a program.
    """

    def arguments(reader: v0.PyTreeCheckpointHandler) -> v0.args.PyTreeRestore:
        tree = reader.metadata(epath.Path(item)).tree
        return v0.args.PyTreeRestore(restore_args=jax.tree.map(as_numpy, tree))

    def as_numpy(leaf: Any) -> v0.RestoreArgs:
        is_text = isinstance(leaf, v0.metadata.StringMetadata)
        return v0.RestoreArgs(restore_type=str if is_text else np.ndarray)

    return _read_item(item, arguments)


def read(
    path: pathlib.Path,
    saved: list[_leaves.Leaf],
    abstract_state: Any,
    arrived: Callable[[list[jax.Array]], None],
) -> Any:
    """Reads a state into the structure and the shardings of `abstract_state`.

    Args:
      path: the step's folder.
      saved: leaves of the manifest.
      abstract_state: pytree of what is wanted.
      arrived: see `load`.
    Returns:
      The values as they are on disk, in the order of `saved`, and as they were wanted,
      in the structure of `abstract_state`.
    """
    leaves, values, treedef = _leaves.flatten(abstract_state)
    by_path = {leaf.path: leaf for leaf in saved}
    order = [by_path[leaf.path] for leaf in leaves]
    asked = [_leaves.for_disk(x, v) for x, v in zip(order, values, strict=True)]
    tree = load(path, jax.tree.unflatten(treedef, asked), arrived)
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
