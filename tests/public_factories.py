"""Every public transformation, found by walking `stabil.transforms.__all__`.

A factory is whatever is annotated to return a gradient transformation; one whose first
parameter is `inner` gets an optimizer to wrap.
"""

import inspect
from collections.abc import Callable

import optax

import stabil.transforms


def _is_factory(value: object) -> bool:
    if not inspect.isfunction(value):
        return False
    return "GradientTransformation" in str(inspect.signature(value).return_annotation)


FACTORIES: dict[str, Callable] = {
    name: getattr(stabil.transforms, name)
    for name in stabil.transforms.__all__
    if _is_factory(getattr(stabil.transforms, name))
}


def wraps(name: str) -> bool:
    """Whether the factory takes an optimizer to wrap."""
    return next(iter(inspect.signature(FACTORIES[name]).parameters), None) == "inner"


def build(
    name: str, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """The transformation with its defaults, around `inner` if it wraps one."""
    return FACTORIES[name](inner) if wraps(name) else FACTORIES[name]()
