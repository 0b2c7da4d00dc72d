"""Plants faults in a training run, the same ones each time.

A `Fault` says what goes wrong, where and when; a schedule is a tuple of them. Each
function below takes a schedule, the step and one part of the run, and hands that part
back with the faults that are due. `activations` is a context for the forward pass. What
is no array has forms of its own: `checkpoint` damages files, `process` kills or hangs
the process, `Disk` and `AlertChannel` take a disk and a channel away for some steps.

The step may be a Python integer, between steps, or a traced scalar inside a compiled
step, so that one compile serves a whole run; a `Dial` in place of the schedule lets one
compile serve any fault. A step without a fault is untouched bit
for bit. What a fault draws depends on its seed, the step and the leaf's name, and on
nothing else: every process of a run plants the same.

Examples:
  >>> import jax.numpy as jnp
  >>> from stabil.testing import inject
  >>> outlier = inject.Fault(
  ...     kind="scale", place="gradients", step=3, where="mlp/kernel", size=1000.0
  ... )
  >>> grads = {"mlp": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}}
  >>> hit = inject.gradients((outlier,), 3, grads)
  >>> print(hit["mlp"]["kernel"], hit["mlp"]["bias"])
  [1000. 1000.] [1. 1.]
  >>> print(outlier)
  scale in gradients mlp/kernel at step 3
"""

from stabil.testing.inject._activations import activations as activations
from stabil.testing.inject._alerts import AlertChannel as AlertChannel
from stabil.testing.inject._checkpoint import checkpoint as checkpoint
from stabil.testing.inject._dial import Dial as Dial
from stabil.testing.inject._dial import names_in as names_in
from stabil.testing.inject._disk import Disk as Disk
from stabil.testing.inject._fault import HOST_KINDS as HOST_KINDS
from stabil.testing.inject._fault import KINDS as KINDS
from stabil.testing.inject._fault import PLACES as PLACES
from stabil.testing.inject._fault import Fault as Fault
from stabil.testing.inject._fault import due as due
from stabil.testing.inject._places import batch as batch
from stabil.testing.inject._places import gradients as gradients
from stabil.testing.inject._places import loss as loss
from stabil.testing.inject._places import moments as moments
from stabil.testing.inject._places import parameters as parameters
from stabil.testing.inject._process import process as process

__all__ = [
    "HOST_KINDS",
    "KINDS",
    "PLACES",
    "AlertChannel",
    "Dial",
    "Disk",
    "Fault",
    "activations",
    "batch",
    "checkpoint",
    "due",
    "gradients",
    "loss",
    "moments",
    "names_in",
    "parameters",
    "process",
]
