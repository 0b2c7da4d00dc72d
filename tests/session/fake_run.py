"""A tiny run, a keeper in memory, and vitals made by hand."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np

from stabil.vocabulary import Cause, Measures, Severity, Tally, Verdict, Vitals

SIGNALS = ("activations/mlp", "loss", "grads/w")


def make_vitals(
    *causes,
    severity=Severity.OK,
    first=-1,
    loss=1.0,
    grad_norm=0.5,
    clip_factor=1.0,
    resets=0,
):
    """Vitals of one step, from names of causes."""
    flags = 0
    for name in causes:
        flags |= Cause[name.upper()]
    i32 = lambda x: jnp.asarray(np.int32(x))  # noqa: E731
    f32 = lambda x: jnp.asarray(np.float32(x))  # noqa: E731
    return Vitals(
        Verdict(i32(flags), i32(severity), i32(first), f32(0)),
        Tally.zero()._replace(resets=i32(resets)),
        Measures(f32(loss), f32(grad_norm), f32(clip_factor), f32(math.nan)),
        None,
        SIGNALS,
    )


class FakeKeeper:
    """Keeps states in memory by the rules of `stabil.checkpoints.Keeper`."""

    def __init__(self, save_every=5):
        self.save_every = save_every
        self.saved, self.tags, self.causes = {}, {}, {}
        self.quarantined, self.fail = [], 0
        self.save_calls = 0

    def save(self, step, state, *, extra=None, data=None, force=False):
        self.save_calls += 1
        if not force and step % self.save_every:
            return False
        if self.fail:
            self.fail -= 1
            raise OSError("disk is gone")
        assert step not in self.saved, f"step {step} is taken"
        copy = jax.tree.map(np.array, state)
        self.saved[step], self.tags[step] = (copy, extra), "pending"
        return True

    def mark(self, step, tag, cause=""):
        if step not in self.saved:
            raise ValueError(f"no step {step}")
        self.tags[step], self.causes[step] = tag, cause

    def steps(self):
        return dict(self.tags)

    def newest_healthy(self, before=None):
        steps = [s for s, tag in self.tags.items() if tag == "healthy"]
        steps = [s for s in steps if before is None or s < before]
        return max(steps, default=None)

    def restore(self, abstract_state, step=None):
        step = self.newest_healthy() if step is None else step
        state, extra = self.saved[step]
        state = jax.tree.map(jnp.asarray, state)
        return types.SimpleNamespace(state=state, step=step, extra=extra)

    def rollback(self, abstract_state, before, reason=""):
        step = self.newest_healthy(before)
        if step is None:
            raise LookupError("no healthy step")
        for later in [s for s in self.saved if s > step]:
            del self.saved[later], self.tags[later]
            self.quarantined.append(later)
        return self.restore(abstract_state, step)

    def wait(self):
        pass
