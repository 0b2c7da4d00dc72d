"""`stabil.probe`: a model that also tells what it saw."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import flax.linen as nn

from stabil.probes import _due, _select, _statistics
from stabil.probes._linen import LinenProbe

if TYPE_CHECKING:
    from flax import nnx

    from stabil.probes._nnx import NnxProbe


def probe(
    model: nn.Module | nnx.Module,
    *,
    where: str | type | tuple[str | type, ...] | None = None,
    stats: str | tuple[str, ...] = ("finite", "absmax", "rms"),
    every: int = 1,
    inputs: bool = False,
    backward: bool = False,
    per_device: bool = False,
) -> LinenProbe | NnxProbe:
    """A model that also returns statistics of its modules' outputs.

    A Linen model's `apply` then returns `(model.apply's own return, Readings)`; an NNX
    model's call, made inside the compiled step, `(the model's own return, Readings)`.

    The readings hold one row per tensor, in the order of execution, named by the
    slash path of the module: `block_0/mlp`. The root has the name of its class, a
    method other than `__call__` is `embed.attend`, the second call of a shared module
    `mlp#2`, the third turn of a scanned layer `layers/mlp[2]`, an entry of a tuple or
    dict output `attn:weights`, an input `attn@input`. Integer tensors have no row.

    The statistics are computed in float32, in one read of each tensor, over its finite
    entries, and reach the caller as a returned array. It works inside and around
    `jit`, `grad` and `vmap` (which adds a leading axis), and through `nn.jit`,
    `nn.remat`, `nn.scan` (a row per layer), `nn.vmap` (one row over the mapped axis),
    `nn.cond` (NaN where a branch was not taken), `nn.while_loop` (the last turn) and
    `nn.custom_vjp`, as they are written.

    Does not: change an operation of the model, its mutable collections, random numbers
    or parameters (outputs stay bit-identical unless the compiler fuses a value that has
    one reader more in another way); see integer outputs.

    Args:
      model: a Flax Linen module, not bound to variables, or an NNX module.
      where: glob over module paths, a module class, or a tuple of both, any of which
        may match: `**` is any number of segments, `*` any text within one, `?` one
        character; a class stands for its subclasses too. None reads the blocks
        (modules whose names differ in a number alone, or that a scan stacks) and the
        model's other direct children, such as embedding, final norm and head: what
        costs nothing that you would notice. `where="**"` is every module.
      stats: names of statistics or groups. The group `all` is, in order: nan_count,
        inf_count, zero_count (entries), min, max, absmax, mean, std, rms (the tensor's
        own unit; NaN where nothing is finite). `finite` is the first two. Further:
        posinf_count, neginf_count, l1, l2, least (the smallest magnitude but zero),
        dynamic_range (octaves from there to absmax), `float16_overflow`,
        `float16_underflow` and the same for bfloat16, float8_e4m3 and float8_e5m2
        (share of the finite entries that a cast would lose), kurtosis (excess; NaN
        where the spread is below 2**-20 of the mean), first_bad_index and absmax_index
        (flat index of the first entry that is not finite, and of the first whose
        magnitude is within 1/128 of the largest; exact to 2**24, then rounded),
        `above_6_share` and `above_6_count` (finite entries of a magnitude above 6, or
        any other number), `q99` or `q999` (the quantile 0.99 or 0.999 of the
        magnitudes, or any other: from a histogram, right to 3.2 %, of some 16,384
        entries, which adds about 1 % and 2 % for normal entries; 0 below 2**-20 of
        the sample's largest), and what `stabil.probes.register` has added.
      every: steps from one reading to the next. Above 1 the probe must know the step:
        `probed.at(step, session.controls)` in place of `probed`. The readings of a
        step that is not due are NaN.
      inputs: whether to probe the arguments of the modules too.
      backward: whether to name the cotangents too. They exist only where gradients are
        taken: `stabil.collect(grad_fn, backward=True)` around a function that calls
        `apply` reads them, as `block_0/mlp@grad`.
      per_device: whether to return `Readings.shards` too: the statistics of what each
        device holds, at no collective, for the comparison of replicas. Indices are
        those in the whole tensor of what the device holds.
    Returns:
      For Linen an object with `apply`, `init` and `model`; for NNX one to call.
    Raises:
      TypeError: `model` is no Flax module, or an argument has the wrong type.
      ValueError: a statistic is unknown, or `every` is no positive number.
    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, stabil
      >>> model = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
      >>> probed = stabil.probe(model, where="layers_*", stats="all")
      >>> params = probed.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> y, readings = probed.apply(params, jnp.ones((1, 3)))
      >>> readings.names, readings.values.shape
      (('layers_0', 'layers_2'), (2, 9))
    """
    nnx = sys.modules.get("flax.nnx")  # not imported for those who do not use it
    if nnx is not None:
        # Imported in the first trace, it would add to what JAX traces under, and so
        # cause a second trace.
        importlib.import_module("stabil.probes._nnx")
    is_nnx = nnx is not None and isinstance(model, nnx.Module)
    if not isinstance(model, nn.Module) and not is_nnx:
        kind = "the class" if isinstance(model, type) else "an object of type"
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(
            "needed an instance of flax.linen.Module or flax.nnx.Module to probe, got "
            f"{kind} {name}; write for example stabil.probe(MyModel(...))"
        )
    for name, value in (
        ("inputs", inputs),
        ("backward", backward),
        ("per_device", per_device),
    ):
        if not isinstance(value, bool):
            raise TypeError(f"needed `{name}` as True or False, got {value!r}")
    _due.check_every(every, "probed")
    options = (
        () if where is None else _select.as_choice(where),
        _statistics.columns(stats),
        every,
        inputs,
        backward,
        per_device,
    )
    if isinstance(model, nn.Module):
        return LinenProbe(model, *options)
    from stabil.probes._nnx import NnxProbe

    return NnxProbe(model, *options)
