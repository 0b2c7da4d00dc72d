"""A fault as arrays: an argument of the compiled step instead of a part of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stabil._tree import path_name
from stabil.testing.inject._dialled import strike_all
from stabil.testing.inject._fault import KINDS, Fault, ends_path, runs_through


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dial:
    """One fault whose every field is an array, for campaigns of many faults.

    A tuple of `Fault`s is compiled into the step; a new one compiles anew. A dial is
    an argument: hand it to `batch`, `loss`, `gradients`, `parameters`, `moments` or
    `activations` where they take a schedule, and one compile serves every fault. It
    strikes what its fault strikes, but draws entries and garbage of its own. A leaf
    that does not take the kind is left as it is. Without a fault it is idle, and an
    idle step is untouched bit for bit.

    Attributes:
      kind: int32 scalar, position in the kinds of arrays.
      step: int32 scalar, first step that it strikes; -1 never.
      duration: int32 scalar, steps in a row.
      struck: bool `[names]`, which of `names` it strikes.
      entries: int32 scalar, entries of each leaf; 0 strikes all.
      size: float32 scalar, as in `Fault`; NaN for the kind's default.
      seed: uint32 scalar.
      names: what can be struck, as `PLACE/path`; static, the same for all faults of a
        campaign. `names_in` makes them.

    Examples:
      >>> grads = {"up": jnp.ones(2), "down": jnp.ones(2)}
      >>> names = names_in("gradients", grads)
      >>> from stabil.testing import inject
      >>> step_fn = jax.jit(lambda dial, step: inject.gradients(dial, step, grads))
      >>> for kind, where in (("nan", "up"), ("inf", "down")):
      ...     fault = Fault(kind=kind, place="gradients", step=3, where=where)
      ...     print(step_fn(Dial.of(fault, names), 3)[where])
      [nan nan]
      [inf inf]
      >>> step_fn._cache_size()
      1
    """

    kind: jax.Array
    step: jax.Array
    duration: jax.Array
    struck: jax.Array
    entries: jax.Array
    size: jax.Array
    seed: jax.Array
    names: tuple[str, ...] = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def of(cls, fault: Fault | None, names: Iterable[str]) -> Dial:
        """The dial of a fault; None makes an idle one.

        Raises:
          ValueError: the fault strikes none of `names`, or one device alone.
        """
        names = tuple(names)
        if fault is None:
            fault = Fault(kind="nan", place="loss", step=0)
            struck, step = np.zeros(len(names), bool), -1
        elif fault.device is not None:
            raise ValueError(
                f"needed a fault of whole arrays for a dial, got {fault}; plant it "
                "with a schedule, between steps"
            )
        else:
            struck, step = np.array([_meets(fault, n) for n in names]), fault.step
            if not struck.any():
                raise ValueError(
                    f"needed a name that {fault} strikes, got {len(names)} names and "
                    "none of them; take them from inject.names_in(place, tree)"
                )
        return cls(
            kind=jnp.int32(KINDS.index(fault.kind)),
            step=jnp.int32(step),
            duration=jnp.int32(fault.duration),
            struck=jnp.asarray(struck),
            entries=jnp.int32(fault.entries),
            size=jnp.float32(np.nan if fault.size is None else fault.size),
            seed=jnp.uint32(fault.seed),
            names=names,
        )

    def plant(self, place: str, step: Any, tree: Any) -> Any:
        """`tree` with the fault, where it strikes leaves of `place` at `step`."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
        names = [f"{place}/{path_name(path)}".rstrip("/") for path, _ in paths]
        leaves = [jnp.asarray(leaf) for _, leaf in paths]
        known = [i for i, name in enumerate(names) if name in self.names]
        if not known:
            return tree
        hits = self.struck[np.array([self.names.index(names[i]) for i in known])]
        struck = self._strike(step, [leaves[i] for i in known], hits)
        for i, leaf in zip(known, struck, strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(treedef, leaves)

    def plant_output(self, path: str, step: Any, out: Any) -> Any:
        """What a module at `path` returns, with the fault where it strikes it."""
        name = f"activations/{path}".rstrip("/")
        if name not in self.names:
            return out
        leaves, treedef = jax.tree.flatten(out)
        hits = jnp.repeat(self.struck[self.names.index(name)], len(leaves))
        struck = self._strike(step, [jnp.asarray(x) for x in leaves], hits)
        return jax.tree.unflatten(treedef, struck)

    def _strike(self, step: Any, leaves: list[jax.Array], hits: jax.Array) -> list:
        due = (step >= self.step) & (step < self.step + self.duration)
        due &= (self.step >= 0) & jnp.any(hits)
        # Every step draws anew.
        seed = self.seed + jnp.asarray(step, jnp.uint32) * jnp.uint32(0x85EBCA6B)

        def hit(leaves: list[jax.Array]) -> list[jax.Array]:
            how = (self.kind, self.size, self.entries)
            return strike_all(how, seed, leaves, hits)

        # A branch and not a select, for the reason given at `struck_leaf`.
        return jax.lax.cond(due, hit, lambda x: x, leaves)


def names_in(place: str, tree: Any) -> tuple[str, ...]:
    """Names of the leaves of `tree` for a `Dial`, as `PLACE/path`.

    Args:
      place: one of the places that hold arrays.
      tree: that part of the run; for activations, a tuple of module paths.

    Examples:
      >>> names_in("gradients", {"mlp": {"kernel": jnp.ones(2)}})
      ('gradients/mlp/kernel',)
      >>> names_in("activations", ("mlp", "head"))
      ('activations/mlp', 'activations/head')
    """
    if place == "activations":
        return tuple(f"{place}/{path}".rstrip("/") for path in tree)
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return tuple(f"{place}/{path_name(path)}".rstrip("/") for path, _ in paths)


def _meets(fault: Fault, name: str) -> bool:
    place, _, path = name.partition("/")
    if place != fault.place:
        return False
    if place == "activations":
        return ends_path(fault.where, path)
    return runs_through(fault.where, path)
