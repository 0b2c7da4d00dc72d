"""The campaign of faults: forty trials on one block, and the five hundred in full.

The five hundred, with processes that die and hang: `pytest -m slow
tests/session/test_campaign.py`, or `python benchmarks/campaign.py --trials 500`.
"""

import json
import pathlib
import sys

import jax
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import campaign  # noqa: E402
import campaign_faults as faults  # noqa: E402
import campaign_runs as runs  # noqa: E402
import campaign_score as scores  # noqa: E402
from campaign_session import Protected  # noqa: E402

from stabil.cli import _demo_model  # noqa: E402
from stabil.telemetry import Event  # noqa: E402
from stabil.testing import inject  # noqa: E402

TINY = _demo_model.Size(layers=1, width=16, heads=2, context=16, batch=16, peak=5e-3)
NAMES = {"parameters": ("a/kernel", "b/bias"), "activations": ("a", "b", "")}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Adam is not clean under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_forty_trials(tmp_path):
    setting = runs.Setting(TINY, 120)
    tried = campaign.Campaign(0, setting, only=[], process=False)
    path = tmp_path / "rows.jsonl"
    rows = campaign.run(tried, list(range(40)), path, quiet=True)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    summary = campaign.report(rows)["summary"]
    assert summary["finished_share"] == 1
    assert summary["nonfinite_params"] == summary["false_interventions"] == 0
    assert summary["poisoned_healthy_checkpoints"] == 0
    assert summary["within_1_percent_share"] >= 0.95
    assert summary["culprit_named_share"] >= 0.95
    # The faults are no straw men.
    assert summary["culprits"] >= 8
    assert summary["within_1_percent_share_of"]["unprotected"] < 0.8


@pytest.mark.slow
def test_five_hundred_trials(tmp_path):
    """Hours on a busy machine; goes on where it stood with `--rows`."""
    tried = campaign.Campaign(0, runs.Setting(campaign.SIZE, campaign.STEPS), [])
    rows = campaign.run(tried, list(range(500)), tmp_path / "rows.jsonl")
    summary = campaign.report(rows)["summary"]
    assert summary["finished_share"] == 1
    assert summary["within_1_percent_share"] >= 0.98
    assert summary["nonfinite_params"] == summary["false_interventions"] == 0
    assert summary["poisoned_healthy_checkpoints"] == 0
    assert summary["culprit_named_share"] >= 0.95


def test_trials_depend_on_number_and_seed_and_cover_every_kind():
    def draw(number, seed):
        return faults.draw(number, seed, 200, NAMES, process=True)

    many = [draw(n, 0) for n in range(600)]
    assert many == [draw(n, 0) for n in range(600)]
    assert many[:50] != [draw(n, 1) for n in range(50)]
    assert {t.place for t in many} == set(faults.PLACES)
    for place in ("activations", "gradients", "parameters", "moments", "loss"):
        assert {t.kind for t in many if t.place == place} == set(inject.KINDS)
    for place, kinds in inject.HOST_KINDS.items():
        assert {t.kind for t in many if t.place == place} == set(kinds)
    steps = [t.fault.step for t in many if t.fault]
    assert min(steps) < 10 and max(steps) >= 190
    assert {t.layer for t in many if t.place == "moments"} == {"a", "b"}


def trial(place="gradients", where="a/kernel", step=10, **fields):
    given = {"kind": "nan", "place": place, "step": step, "where": where} | fields
    return faults.Trial(0, 0, place, inject.Fault(**given))


def seen(*events, **fields):
    given = dict(ended=True, stopped="", loss=1.0, sound=True, bad_steps=0, healthy={})
    given["summary"] = {"steps_lost": 0, "actions": {}}
    return Protected(**given | fields | {"events": list(events)})


def event(data_index, layer, action="skip"):
    return Event(action=action, data_index=data_index, layer=layer, severity="block")


# At every 8 steps: 3 until step 64, 2 until 104, then 1.
CLEAN = {"loss": 1.0, "levels": [3.0] * 8 + [2.0] * 5 + [1.0] * 12}
RUINED = {"unprotected": {"loss": float("nan"), "sound": False}}


@pytest.mark.parametrize(
    ("planted", "named", "at", "right"),
    [
        (trial(), "grads/a/kernel", 10, True),
        (trial(), "grads/b/bias", 10, False),
        (trial(), "grads/a/kernel", 11, False),  # one step too late
        (trial("parameters"), "params/a/kernel", 15, True),  # lasting damage
        (trial("parameters"), "activations/a", 25, False),
        (trial("batch", ""), "loss", 10, True),
        (trial("activations", "a"), "activations/ab", 10, False),
    ],
)
def test_the_first_alarm_must_name_step_and_module(planted, named, at, right):
    row = scores.score(planted, seen(event(at, named)), CLEAN, RUINED, 8)
    assert (row["named_rightly"], row["has_culprit"]) == (right, True)
    assert row["steps_to_detect"] == at - 10 and not row["false_interventions"]


def test_what_comes_before_a_fault_is_false():
    events = [event(3, "loss"), event(4, "loss", "clip"), event(10, "grads/a/kernel")]
    row = scores.score(trial(), seen(*events), CLEAN, RUINED, 8)
    assert (row["false_interventions"], row["false_clips"]) == (1, 1)
    bare = faults.Trial(0, 0, "none", None)
    row = scores.score(bare, seen(*events), CLEAN, {}, 8)
    assert row["false_interventions"] == 2 and not row["has_culprit"]


@pytest.mark.parametrize(
    ("fields", "within", "poisoned"),
    [
        (dict(loss=1.009, healthy={80: 2.1, 120: 1.0}), True, []),
        (dict(loss=1.02, healthy={80: 2.3}), False, [80]),
        (dict(loss=float("nan"), healthy={120: float("nan")}), False, [120]),
        (dict(sound=False), False, []),
    ],
    ids=["held", "off", "nan", "unsound"],
)
def test_endings_and_poisoned_checkpoints(fields, within, poisoned):
    row = scores.score(trial(), seen(**fields), CLEAN, RUINED, 8)
    assert (row["within"], row["poisoned_healthy"]) == (within, poisoned)
    summary = scores.summarize([row])
    assert summary["within_1_percent_share"] == float(within)
    assert summary["nonfinite_params_of"] == {"unprotected": 1}
    json.dumps(scores.by_kind([row]), allow_nan=False)


def test_a_checkpoint_may_be_behind_by_the_steps_that_the_fault_struck():
    struck = trial("batch", "", step=50, duration=12)
    for loss, poisoned in ((3.2, []), (3.4, [80])):
        row = scores.score(struck, seen(healthy={80: loss}), CLEAN, RUINED, 8)
        assert row["poisoned_healthy"] == poisoned
