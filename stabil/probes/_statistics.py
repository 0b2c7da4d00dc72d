"""The registry: which sums each statistic needs, and what it makes of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from stabil.probes import _kurtosis, _places, _quantiles, _sums
from stabil.probes._captured import Own
from stabil.probes._formats import FORMATS
from stabil.probes._sums import LARGEST, SUMS, Elements, Quantities


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A number per tensor.

    Attributes:
      needs: names of the `Sums` in `SUMS` that it reads.
      finish: from the number of finite elements and the merged quantities by group
        to a float32 array.
    """

    needs: tuple[str, ...]
    finish: Callable[[jax.Array, Mapping[str, Quantities]], jax.Array]


def _measured(n: jax.Array, value: jax.Array) -> jax.Array:
    """NaN where there was no finite element to measure."""
    return jnp.where(n > 0, value, jnp.nan)


def _count(group: str) -> Statistic:
    return Statistic((group,), lambda n, q: q[group][0])


def _value(group: str, index: int = 0) -> Statistic:
    return Statistic((group,), lambda n, q: _measured(n, q[group][index]))


STATISTICS: dict[str, Statistic] = {
    "nan_count": _count("nan"),
    "inf_count": _count("inf"),
    "zero_count": _count("zero"),
    "min": _value("min"),
    "max": _value("max"),
    "absmax": _value("absmax"),
    "mean": _value("moments", 0),
    "std": _value("moments", 1),
    "rms": _value("rms"),
}

STANDARD = tuple(STATISTICS)


def _saturated(n: jax.Array, value: jax.Array) -> jax.Array:
    return _measured(n, jnp.minimum(value, LARGEST))


def _dynamic_range(n: jax.Array, q: Mapping[str, Quantities]) -> jax.Array:
    least = q["least"][0]
    octaves = jnp.log2(q["absmax"][0]) - jnp.log2(least)
    return jnp.where(jnp.isfinite(least), octaves, jnp.nan)


STATISTICS |= {
    "posinf_count": _count("posinf"),
    "neginf_count": Statistic(
        ("inf", "posinf"), lambda n, q: q["inf"][0] - q["posinf"][0]
    ),
    "l1": Statistic(("mean_abs",), lambda n, q: _saturated(n, q["mean_abs"][0] * n)),
    "l2": Statistic(("rms",), lambda n, q: _saturated(n, q["rms"][0] * jnp.sqrt(n))),
    "least": Statistic(
        ("least",),
        lambda n, q: jnp.where(jnp.isfinite(q["least"][0]), q["least"][0], jnp.nan),
    ),
    "dynamic_range": Statistic(("absmax", "least"), _dynamic_range),
}

SUMS |= {
    "fourth": _kurtosis.FOURTH_MOMENT,
    "first_bad": _places.FIRST_BAD,
    "largest_at": _places.LARGEST_AT,
    "magnitudes": _quantiles.MAGNITUDES,
}
STATISTICS |= {
    "kurtosis": Statistic(
        ("fourth",), lambda n, q: _measured(n, _kurtosis.excess_kurtosis(q["fourth"]))
    ),
    "absmax_index": Statistic(
        ("largest_at",), lambda n, q: _places.as_index(*q["largest_at"][1:3])
    ),
    "first_bad_index": Statistic(
        ("first_bad",), lambda n, q: _places.as_index(*q["first_bad"][:2])
    ),
}

for _name, _sum in FORMATS.items():
    SUMS[_name] = _sum
    STATISTICS[_name] = _value(_name)

GROUPS: dict[str, tuple[str, ...]] = {
    "finite": ("nan_count", "inf_count"),
    "all": STANDARD,
    "norms": ("l1", "l2"),
    "formats": tuple(FORMATS),
}


_ABOVE = re.compile(r"above_(\d+(?:\.\d+)?(?:e[+-]?\d+)?)_(count|share)")
_QUANTILE = re.compile(r"q(\d+)")
_WITH_NUMBER = re.compile(f"{_ABOVE.pattern}|{_QUANTILE.pattern}")


def _is_known(name: str) -> bool:
    """Whether a statistic has this name; one whose name holds a number is made."""
    if name in STATISTICS:
        return True
    if found := _ABOVE.fullmatch(name):
        bound, kind = float(found[1]), found[2]
        own = f"above:{bound}"
        SUMS.setdefault(own, _sums.plain(lambda e: jnp.abs(e.value) > bound, "add"))
        STATISTICS[name] = _count(own)
        if kind == "share":
            STATISTICS[name] = Statistic(
                (own,), lambda n, q: _measured(n, q[own][0] / jnp.maximum(n, 1))
            )
    elif found := _QUANTILE.fullmatch(name):
        level = float(f"0.{found[1]}")
        STATISTICS[name] = Statistic(
            ("absmax", "magnitudes"),
            lambda n, q: _measured(
                n, _quantiles.quantile(level, q["absmax"][0], q["magnitudes"])
            ),
        )
    return name in STATISTICS


def register(
    name: str,
    of: Callable[[Elements], jax.Array],
    *,
    combine: str = "add",
    finish: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> None:
    """Adds a statistic of your own, computed in the same pass as the others.

    Args:
      name: its column; not in use.
      of: what each element adds: from `Elements` (`raw`, `finite`, `value`, each of
        the tensor's shape, float32 or bool) to an array of the same shape. It may
        close over arrays, those of the step that is traced included.
      combine: `add`, `min` or `max`: how the elements combine, and so how parts of a
        tensor do.
      finish: from the number of finite elements and the combined value, float32, to
        the statistic; the combined value itself if None.
    Raises:
      TypeError: `of` or `finish` cannot be called.
      ValueError: `name` is in use or `combine` is unknown.
    Examples:
      >>> import jax.numpy as jnp
      >>> from stabil import probes
      >>> probes.register("negatives", lambda e: e.value < 0)
      >>> x = jnp.array([-7.0, -8.0, 1.0, jnp.nan])
      >>> print(probes.tree_statistics({"x": x}, stats="negatives")["negatives"])
      [2.]
    """
    if not isinstance(name, str) or name in GROUPS or _is_known(name):
        raise ValueError(
            f"needed a name that is not in use for a statistic, got {name!r}; write "
            "for example stabil.probes.register('negatives', lambda e: e.value < 0)"
        )
    if not callable(of) or not (finish is None or callable(finish)):
        raise TypeError(
            f"needed functions for `of` and `finish`, got {of!r} and {finish!r}; write "
            "for example stabil.probes.register('negatives', lambda e: e.value < 0)"
        )
    if combine not in ("add", "min", "max"):
        raise ValueError(
            f"needed `combine` as 'add', 'min' or 'max', got {combine!r}; write for "
            "example stabil.probes.register('negatives', lambda e: e.value < 0)"
        )
    own = f"user:{name}"
    (term,) = (plain := _sums.plain(of, combine)).terms
    terms = (term._replace(of=Own(term.of)),)
    SUMS[own] = dataclasses.replace(plain, terms=terms)
    last = finish or (lambda n, value: value)
    STATISTICS[name] = Statistic((own,), lambda n, q: last(n, q[own][0]))


def columns(stats: str | tuple[str, ...]) -> tuple[str, ...]:
    """The statistics that `stats` asks for, in the registry's order.

    Args:
      stats: the name of a statistic or group (`"all"` is the group of the nine standard
        ones), or a tuple of such names.
    Returns:
      Names of statistics, each once.
    Raises:
      TypeError: `stats` is no string and no sequence of strings.
      ValueError: `stats` is empty, or a name is unknown.
    Examples:
      >>> columns(("rms", "finite"))
      ('nan_count', 'inf_count', 'rms')
    """
    asked = (stats,) if isinstance(stats, str) else stats
    if not isinstance(asked, (tuple, list)) or not all(
        isinstance(s, str) for s in asked
    ):
        raise TypeError(
            "needed `stats` as a name or a tuple of names, got "
            f"{stats!r}; write for example stats=('finite', 'absmax', 'rms')"
        )
    wanted: set[str] = set()
    for name in asked:
        if name in GROUPS:
            wanted.update(GROUPS[name])
        elif _is_known(name):
            wanted.add(name)
        else:
            fixed = (n for n in STATISTICS if not _WITH_NUMBER.fullmatch(n))
            raise ValueError(
                f"needed the name of a statistic in `stats`, got {name!r}; there are "
                f"{', '.join(fixed)}, with numbers of your own above_6_share, "
                f"above_6_count and q99, and the groups {', '.join(GROUPS)}: "
                "write for example stats=('finite', 'absmax', 'rms')"
            )
    if not wanted:
        raise ValueError(
            f"needed at least one statistic in `stats`, got {stats!r}; write for "
            "example stats=('finite', 'absmax', 'rms')"
        )
    return tuple(name for name in STATISTICS if name in wanted)
