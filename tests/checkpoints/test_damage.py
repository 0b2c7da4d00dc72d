"""Damage to every kind of file: found and survived, or without effect; never silent.

The campaign: `python -m pytest -n 0 -s -m slow tests/checkpoints/test_damage.py`.
"""

import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stabil.checkpoints import Keeper, verify

KINDS = ("flip", "truncate", "empty", "remove", "zero_page", "swap", "append")


def make_state(seed):
    key = jax.random.key(seed)
    return {
        "w": jax.random.normal(key, (64, 257)),
        "h": jax.random.normal(key, (3000,)).astype(jnp.bfloat16),
        "n": jnp.int32(seed),
        "ids": np.arange(seed, seed + 500),
        "key": key,
        "epoch": seed,
    }


TARGET = jax.eval_shape(lambda: make_state(0)) | {"epoch": 0, "ids": np.arange(500)}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="plain"),
        pytest.param(True, id="zstd", marks=pytest.mark.slow),
    ],
)
def folder(request, tmp_path_factory):
    """A run with the healthy steps 1 and 2."""
    path = tmp_path_factory.mktemp("damage") / "run"
    keeper = Keeper(path, compress=request.param)
    for step in (1, 2):
        keeper.save(step, make_state(step), extra={"data": step}, force=True)
        keeper.wait()
        keeper.mark(step, "healthy")
    return path


def damage(path, kind, chance, other):
    """Changes one file; False where the kind changes nothing in it."""
    raw = bytearray(path.read_bytes())
    if kind == "remove":
        path.unlink()
        return True
    if kind == "swap":
        changed = bytearray(other.read_bytes()) if other.is_file() else raw
    elif kind == "empty":
        changed = bytearray()
    elif kind == "append":
        changed = raw + b"\0" * 7
    elif kind == "truncate":
        changed = raw[: chance.randrange(len(raw))] if raw else raw
    else:
        changed = bytearray(raw)
        if raw and kind == "flip":
            changed[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        elif raw:
            at = chance.randrange(len(raw)) // 4096 * 4096
            changed[at : at + 4096] = bytes(len(changed[at : at + 4096]))
    if changed == raw:
        return False
    path.write_bytes(bytes(changed))
    return True


def equal(state, step):
    expected = make_state(step)
    for name, x in expected.items():
        a, b = state[name], x
        if name == "key":
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        same = np.array_equal(np.asarray(a), np.asarray(b))
        if not same or getattr(a, "dtype", None) != getattr(b, "dtype", None):
            return False
    return True


def one_case(folder, tmp_path, seed):
    """Returns what happened, or None where the damage changed nothing."""
    chance = random.Random(seed)
    run = tmp_path / f"case{seed}"
    shutil.copytree(folder, run)
    files = sorted(p for p in (run / "2").rglob("*") if p.is_file())
    victim, kind = files[seed % len(files)], KINDS[seed // len(files) % len(KINDS)]
    other = run / "1" / victim.relative_to(run / "2")
    if not damage(victim, kind, chance, other):
        shutil.rmtree(run)
        return None
    what = f"{kind} {victim.relative_to(run)}"
    # First as a restart sees it, then as somebody who looks.
    restored = Keeper(run).restore(TARGET)
    found = {v.step: v.ok for v in verify(run)}
    # A tag that is gone is one that was never given.
    untagged = (victim.name, kind) == ("stabil-health.json", "remove")
    assert found[1] and bool(found.get(2)) == untagged, what
    assert equal(restored.state, restored.step), f"silently wrong: {what}"
    assert restored.extra == {"data": restored.step}, what
    shutil.rmtree(run)
    return "harmless" if restored.step == 2 else "survived"


def test_damage_of_many_kinds(folder, tmp_path):
    outcomes = [one_case(folder, tmp_path, seed) for seed in range(3, 400, 41)]
    assert {"survived", "harmless"} <= set(outcomes)


@pytest.mark.slow
def test_damage_campaign(folder, tmp_path):
    outcomes = [one_case(folder, tmp_path, seed) for seed in range(400)]
    assert len(outcomes) - outcomes.count(None) >= 200
    print({o: outcomes.count(o) for o in sorted(set(outcomes), key=str)})
