"""What importing the package costs, and what its namespace holds."""

import subprocess
import sys

import pytest

import stabil


def run(code: str) -> str:
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    return out.stdout.strip()


def test_import_brings_neither_orbax_nor_what_the_host_half_needs():
    loaded = run(
        "import sys, stabil; stabil.guard; stabil.vitals; stabil.spike_aware;"
        "print([m for m in ('orbax', 'matplotlib') if m in sys.modules])"
    )
    assert loaded == "[]"


def test_import_adds_no_module_of_others_to_those_of_flax_and_optax():
    added = run(
        "import sys, flax, optax; before = set(sys.modules); import stabil;"
        "stabil.guard, stabil.vitals;"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    assert added == "['stabil']"


def test_every_public_name_resolves():
    for name in stabil.__all__:
        assert getattr(stabil, name) is not None
    assert set(dir(stabil)) == set(stabil.__all__)


def test_unknown_name_is_explained():
    with pytest.raises(AttributeError) as error:
        _ = stabil.gaurd
    assert str(error.value) == (
        f"module 'stabil' has no attribute 'gaurd'; it has {', '.join(stabil.__all__)}"
    )
