"""The leaves of a state: their names, what Orbax is given for them, what comes back."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stabil.checkpoints._errors import StructureError

_PYTHON = (bool, int, float, str)
# Names listed in an error before it says how many more there are.
_LISTED = 8


class Leaf(NamedTuple):
    """What is known of a leaf without its values.

    Attributes:
      path: one text per level, for example `("params", "mlp", "kernel")`.
      kind: `array` (JAX), `numpy`, `key` (typed PRNG key), `python` (bool, int, float,
        str) or `empty` (an array without elements, which Orbax cannot hold).
      shape: shape; `()` for Python values.
      dtype: name of the dtype; the type's name for Python values.
    """

    path: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def name(self) -> str:
        """The path joined by slashes."""
        return "/".join(self.path)

    @property
    def form(self) -> str:
        """Dtype and shape for people, for example `float32[8, 4]`."""
        return f"{self.dtype}{list(self.shape) if self.kind != 'python' else ''}"


def parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    """A key path of JAX as one text per level."""
    return tuple(
        jax.tree_util.keystr((key,), simple=True, separator="/") for key in path
    )


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def describe(path: tuple[str, ...], value: Any) -> Leaf:
    """The `Leaf` of a value or of a `jax.ShapeDtypeStruct`.

    Raises:
      TypeError: the value is of a kind that a checkpoint cannot hold.
    """
    if isinstance(value, _PYTHON) and not isinstance(value, np.generic):
        return Leaf(path, "python", (), type(value).__name__)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    holds = isinstance(value, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))
    if not holds or (not is_key(value) and np.dtype(dtype).kind in "OSUmM"):
        raise TypeError(
            "needed arrays, PRNG keys, numbers or text in a state, got "
            f"{type(value).__name__} at {'/'.join(path)!r}: take it out of the state, "
            "or save it as JSON with save(..., extra={...})"
        )
    shape = tuple(int(n) for n in shape or ())
    if is_key(value):
        return Leaf(path, "key", shape, str(dtype))
    kind = "numpy" if isinstance(value, (np.ndarray, np.generic)) else "array"
    if 0 in shape:
        kind = "empty"
    return Leaf(path, kind, shape, np.dtype(dtype).name)


def flatten(state: Any) -> tuple[list[Leaf], list[Any], Any]:
    """Leaves, values and treedef of a state, concrete or abstract.

    Raises:
      TypeError: a leaf is of a kind that a checkpoint cannot hold.
      ValueError: two leaves would have one name on disk.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(state)
    leaves = [describe(parts(path), value) for path, value in pairs]
    seen: dict[str, Leaf] = {}
    for leaf in leaves:
        # Orbax joins the levels with dots.
        other = seen.setdefault(".".join(leaf.path), leaf)
        if other is not leaf:
            raise ValueError(
                f"needed leaves with different names, got {other.path} and "
                f"{leaf.path}, which are one name on disk: rename a key that holds a "
                "dot"
            )
    return leaves, [value for _, value in pairs], treedef


def _is_record(node: Any) -> bool:
    return hasattr(node, "_fields") and type(node).__module__.startswith("stabil.")


def statistics(state: Any) -> set[tuple[str, ...]]:
    """Paths of stabil's own statistics, in which NaN means "not measured".

    They are the arrays that are themselves fields of a record of stabil's. Moments
    are trees like the parameters: they lie deeper, and must be finite.
    """
    found: set[tuple[str, ...]] = set()

    def visit(node: Any, prefix: tuple[str, ...]) -> None:
        if _is_record(node):
            for name, value in zip(node._fields, node, strict=True):
                if hasattr(value, "dtype"):
                    found.add((*prefix, name))
                else:
                    visit(value, (*prefix, name))
            return
        for path, leaf in jax.tree_util.tree_flatten_with_path(
            node, is_leaf=_is_record
        )[0]:
            if _is_record(leaf):
                visit(leaf, prefix + parts(path))

    visit(state, ())
    return found


def to_disk(leaf: Leaf, value: Any) -> Any:
    """What Orbax is given for a leaf; later changes of a NumPy leaf do not reach it."""
    if leaf.kind == "empty":
        return None
    if leaf.kind == "numpy" or leaf.dtype == "bool" and leaf.kind == "python":
        return np.array(value)
    return value


def for_disk(saved: Leaf, wanted: Any) -> Any:
    """The abstract leaf that Orbax is given to read `saved` for `wanted`."""
    if saved.kind == "empty":
        return None
    if saved.kind == "python" and saved.dtype != "bool":
        return {"int": 0, "float": 0.0, "str": ""}[saved.dtype]
    if saved.kind in ("numpy", "python"):
        # No memory: one element, seen as many.
        return np.broadcast_to(np.zeros([], np.dtype(saved.dtype)), saved.shape)
    sharding = getattr(wanted, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    dtype = getattr(wanted, "dtype", None) if saved.kind == "key" else saved.dtype
    return jax.ShapeDtypeStruct(saved.shape, dtype, sharding=sharding)


def from_disk(saved: Leaf, wanted: Any, value: Any) -> Any:
    """The restored leaf, of the type that `wanted` has."""
    if saved.kind == "empty":
        empty = np.zeros(saved.shape, np.dtype(saved.dtype))
        return empty if isinstance(wanted, np.ndarray) else jnp.asarray(empty)
    if saved.kind == "python":
        value = value.item() if isinstance(value, np.ndarray) else value
        if isinstance(wanted, _PYTHON):
            return value
        if isinstance(wanted, (np.ndarray, np.generic)):
            return np.asarray(value, wanted.dtype)
        return jnp.asarray(value, wanted.dtype)
    if isinstance(wanted, (np.ndarray, np.generic)):
        return np.array(value)
    if saved.kind == "numpy":
        if jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
            return value
        sharding = getattr(wanted, "sharding", None)
        return jax.device_put(value, sharding) if sharding else jnp.array(value)
    return value


def _fits(saved: Leaf, wanted: Leaf) -> bool:
    if saved[2:] == wanted[2:] and (saved.kind == "key") == (wanted.kind == "key"):
        return True
    # A Python number and a scalar array of its kind are two writings of one thing: a
    # step counter is often 0 before the first step and an array after it.
    families = {"bool": "b", "int": "iu", "float": "f"}
    for python, array in ((saved, wanted), (wanted, saved)):
        if python.kind == "python" and array.kind in ("array", "numpy"):
            family = families.get(python.dtype, "")
            kind = "f" if "float" in array.dtype else np.dtype(array.dtype).kind
            return array.shape == () and kind in family
    return False


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:_LISTED])
    return shown + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def compare(step: int, saved: list[Leaf], wanted: list[Leaf]) -> None:
    """Refuses a state whose leaves are not those that were saved.

    Raises:
      StructureError: names every leaf that is missing, unexpected, or of another shape
        or dtype.
    """
    old = {leaf.path: leaf for leaf in saved}
    new = {leaf.path: leaf for leaf in wanted}
    missing = [f"{x.name} {x.form}" for p, x in new.items() if p not in old]
    unexpected = [f"{x.name} {x.form}" for p, x in old.items() if p not in new]
    differing = [
        f"{x.name} is {x.form} on disk and {new[p].form} asked for"
        for p, x in old.items()
        if p in new and not _fits(x, new[p])
    ]
    if not missing and not unexpected and not differing:
        return
    text = f"needed a state with the leaves that step {step} was saved with"
    if missing:
        text += f"; not in the checkpoint: {listed(missing)}"
    if unexpected:
        text += f"; only in the checkpoint: {listed(unexpected)}"
    if differing:
        text += f"; different: {listed(differing)}"
    raise StructureError(
        text
        + ". Nothing was cast or left out: build abstract_state from the model and "
        "the optimizer that were saved, for example with jax.eval_shape"
    )
