"""What a cast to a narrow format would lose."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from stabil.probes._sums import Elements, Sums, share

# From where on a magnitude rounds to something that is not finite, and whether that
# bound itself does; up to where it rounds to zero (ties go to the even zero).
_LIMITS = {
    "float16": (65520.0, True, 2.0**-25),
    "bfloat16": ((2 - 2**-8) * 2.0**127, True, 2.0**-134),
    "float8_e4m3": (464.0, False, 2.0**-10),
    "float8_e5m2": (61440.0, True, 2.0**-17),
}


def _overflows(bound: float, itself: bool) -> Callable[[Elements], jax.Array]:
    if itself:
        return lambda e: jnp.abs(e.value) >= bound
    return lambda e: jnp.abs(e.value) > bound


def _underflows(bound: float) -> Callable[[Elements], jax.Array]:
    return lambda e: (e.value != 0) & (jnp.abs(e.value) <= bound)


FORMATS: dict[str, Sums] = {}
for _format, (_top, _itself, _bottom) in _LIMITS.items():
    FORMATS[f"{_format}_overflow"] = share(_overflows(_top, _itself))
    FORMATS[f"{_format}_underflow"] = share(_underflows(_bottom))
