"""Which steps stay on disk beside the newest ones."""

import json
import math
import re

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabil.checkpoints import KeepAlso, Keeper, _folder, _retention


def known(tags):
    return {step: _retention.Known(tag) for step, tag in tags.items()}


TAGS = st.dictionaries(
    st.integers(0, 200), st.sampled_from(_folder.TAGS[:3]), min_size=1, max_size=40
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(TAGS, st.integers(1, 6), st.integers(1, 4), st.integers(2, 12))
def test_retention_keeps_what_a_run_needs(tags, keep_last, keep_newest, keep_pending):
    kept = _retention.kept(
        known(tags),
        keep_last=keep_last,
        keep_newest=keep_newest,
        keep_pending=keep_pending,
    )
    assert kept <= set(tags) and max(tags) in kept
    healthy = sorted(s for s in tags if tags[s] == "healthy")
    assert set(healthy[-keep_last:]) <= kept
    newest = healthy[-1] if healthy else -1
    pending = sorted(s for s in tags if tags[s] == "pending" and s > newest)
    if pending:
        assert pending[0] in kept and pending[-1] in kept
    if len(pending) <= keep_pending:
        assert set(pending) <= kept
    assert len(kept) <= keep_last + keep_newest + keep_pending


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["healthy", "suspect", None]), max_size=60))
def test_no_order_of_verdicts_loses_the_newest_healthy_step(verdicts):
    """Each save is judged a random number of saves later, or never."""
    tags = {}
    judged = 0
    for step, verdict in enumerate(verdicts):
        tags[step] = "pending"
        if verdict and judged <= step:
            if judged in tags:
                tags[judged] = verdict
            judged += 1
        healthy = [s for s in tags if tags[s] == "healthy"]
        kept = _retention.kept(known(tags), keep_last=1)
        tags = {s: t for s, t in tags.items() if s in kept}
        assert not healthy or max(healthy) in tags


def healthy(metrics=None, saved=None, steps=range(10, 110, 10)):
    """Healthy steps 10, 20, ... with their metrics and the minutes of their saves."""
    metrics, saved = metrics or {}, saved or {}
    return {
        step: _retention.Known(
            "healthy", metrics.get(step, math.nan), 60.0 * saved.get(step, 0)
        )
        for step in steps
    }


def stay(steps, rule):
    """The steps that the rule alone keeps: the newest two stay in any case."""
    return sorted(_retention.kept(steps, keep_last=1, keep_also=rule) - {90, 100})


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("lowest", "best"), [(True, [20, 60, 70]), (False, [10, 30, 50])]
)
def test_the_best_stay_and_nan_is_the_worst(lowest, best):
    metrics = {10: 3, 20: 1, 30: 4, 40: NAN, 50: 5, 60: 1, 70: 2, 80: -INF, 90: INF}
    rule = KeepAlso(best=3, lowest_is_best=lowest)
    assert stay(healthy(metrics), rule) == best
    # Nothing but NaN: none of them is best.
    assert stay(healthy({10: NAN}), rule) == []
    # A suspect step is not kept for its metric.
    ill = healthy(metrics) | {best[0]: _retention.Known("suspect", metrics[best[0]])}
    assert best[0] not in stay(ill, rule)


def test_keeping_the_best_does_not_lose_the_newest():
    """A manager that ranks by metric alone keeps 3 and 4, and cannot resume from 5."""
    steps = healthy({1: 3.0, 2: NAN, 3: 2.0, 4: 2.5, 5: 5.0}, steps=range(1, 6))
    rule = KeepAlso(best=2)
    assert _retention.kept(steps, keep_last=1, keep_also=rule) == {3, 4, 5}


def test_one_step_in_so_many_stays():
    assert stay(healthy(), KeepAlso(every_steps=40)) == [10, 40, 80]
    # Of a span whose first step fell ill, the next.
    ill = healthy() | {40: _retention.Known("suspect")}
    assert stay(ill, KeepAlso(every_steps=40)) == [10, 50, 80]


def test_one_step_in_so_many_minutes_stays_whatever_the_clock_does():
    minutes = {step: step // 10 for step in range(10, 110, 10)}
    rule = KeepAlso(every_minutes=3)
    assert stay(healthy(saved=minutes), rule) == [10, 40, 70]
    # Put back by an hour at step 50: the spans are counted on from there.
    back = {s: m - 60 * (s >= 50) for s, m in minutes.items()}
    assert stay(healthy(saved=back), rule) == [10, 40, 80]


def test_what_stays_once_stays_for_ever():
    """The rules agree with themselves after what they gave up is gone."""
    saved = {step: (7 * step) % 13 for step in range(200)}
    metrics = {step: float((5 * step) % 11) for step in range(200)}
    rule = KeepAlso(best=2, every_steps=16, every_minutes=4, milestones=[33, 34])
    there, firsts = {}, set()
    for step in range(200):
        there |= healthy(metrics, saved, [step])
        kept = _retention.kept(there, keep_last=3, keep_also=rule)
        there = {s: k for s, k in there.items() if s in kept}
        if step % 16 == 0:
            firsts.add(step)
        assert firsts <= set(there)
    assert {33, 34} <= set(there)


def test_a_run_keeps_best_and_milestones(tmp_path):
    rule = KeepAlso(best=1, milestones=[4])
    keeper = Keeper(tmp_path, keep_last=1, keep_also=rule, save_every=3)
    metrics = {0: 9.0, 3: 1.0, 4: NAN, 6: 2.0, 9: 3.0, 12: 4.0}
    for step in range(13):
        if keeper.save(step, {"w": jnp.ones(3)}, metric=metrics.get(step)):
            keeper.wait()
            keeper.mark(step, "healthy")
    keeper.save(15, {"w": jnp.ones(3)})
    keeper.wait()
    # Step 4 was not due, and its metric is NaN; it is a milestone.
    tags = {3: "healthy", 4: "suspect", 12: "healthy", 15: "pending"}
    assert keeper.steps() == tags
    lines = (tmp_path / "deletions.jsonl").read_text().splitlines()
    assert [json.loads(line)["path"] for line in lines] == ["0", "6", "9"]
    # A metric that comes later counts as well, and NaN makes nothing healthy.
    assert keeper.mark(15, "healthy", metric=0.5) == "healthy"
    keeper.save(18, {"w": jnp.ones(3)})
    keeper.wait()
    assert 3 not in keeper.steps()
    assert keeper.mark(18, "healthy", metric=INF) == "suspect"
    assert keeper.mark(18, "healthy") == "suspect"
    assert keeper.mark(18, "healthy", metric=0.1) == "healthy"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"best": -1}, "needed best as a whole number >= 0, got -1"),
        ({"every_steps": 0}, "needed every_steps as a whole number >= 1, got 0"),
        ({"every_minutes": 0}, "needed every_minutes > 0, or None, got 0"),
    ],
)
def test_rules_out_of_range(settings, text):
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        KeepAlso(**settings)


def test_a_metric_is_a_number(tmp_path):
    text = "needed metric as a number, got 'low'"
    with pytest.raises(TypeError, match="^" + re.escape(text) + "$"):
        Keeper(tmp_path).save(1, {"w": jnp.ones(3)}, metric="low")
