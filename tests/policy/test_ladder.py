"""The ladder decides by the observations alone, by degrees, and comes to an end."""

import json
import math
import re
import time

import numpy as np
import pytest

from stabil.policy import (
    BLOCK,
    Ladder,
    Observation,
    Rung,
    advise,
    careful,
    observe,
    unattended,
)
from stabil.policy._level import EXTREME, FAR, LossLevel
from stabil.policy._rungs import DAMAGE
from stabil.vocabulary import Cause, Severity

NAN_GRADIENT = dict(severity=BLOCK, causes=("nonfinite_gradient",), first="grads/w")


def run(ladder, observations):
    """All actions of a stream, as pairs of step and action."""
    return [(o.step, a) for o in observations for a in ladder.decide(o)]


def kinds(actions, *, acted_only=True):
    return [(s, a.kind) for s, a in actions if not (acted_only and a.report_only)]


def calm(steps, rng, first=0, level=2.0):
    noise = rng.normal(0, 0.02, steps)
    return [Observation(first + i, loss=level + noise[i]) for i in range(steps)]


def test_severities_and_causes_are_those_of_the_vocabulary():
    from stabil.policy import _rungs, _words

    pairs = dict(OK=_words.OK, WATCH=_words.WATCH, WARN=_words.WARN, BLOCK=_words.BLOCK)
    assert pairs == {s.name: int(s) for s in Severity}
    known = {c.name.lower() for c in Cause}
    assert {c for r in _rungs.FULL for c in r.causes} <= known


@pytest.mark.parametrize("seed", range(3))
def test_healthy_noise_with_single_blips_calls_for_no_intervention(seed):
    rng = np.random.default_rng(seed)
    losses = 3.0 * np.exp(-np.arange(5000) / 800) + 2.0 + rng.standard_t(3, 5000) * 0.03
    stream = []
    for i, loss in enumerate(losses):
        severity = BLOCK if i % 97 == 96 else (2 if i % 61 == 60 else 0)
        causes = ("loss_spike",) if severity else ()
        stream.append(Observation(i, severity, causes, loss=float(loss)))
    done = {k for _, k in kinds(run(Ladder(), stream))}
    assert done == {"skip", "log", "look"}


def test_a_verdict_below_block_is_one_line_in_the_log():
    seen = Observation(4, severity=1, causes=("gradient_spike",), first="grads/w")
    (action,) = Ladder().decide(seen)
    assert action.kind == "log"
    assert action.reason == "a verdict above OK (gradient_spike in grads/w)"


def test_clip_and_device_reset_are_recorded_and_nothing_more():
    seen = Observation(4, clip_factor=0.25, grad_norm=8.0, resets=3)
    actions = Ladder().decide(seen)
    assert [a.kind for a in actions] == ["clip", "reset"]
    assert actions[0].numbers["clip_factor"] == 0.25
    assert "held down after an alarm" in actions[0].reason
    spike = seen._replace(severity=1, causes=("gradient_spike",), first="grads")
    told = Ladder().decide(spike)[0].reason
    assert told == "the gradient was scaled by 0.25 (gradient_spike in grads)"
    assert actions[1].numbers == {"leaves": 3, "by": "device"}


def test_third_damaged_step_in_a_row_rolls_back_to_before_the_first():
    stream = [Observation(i, **NAN_GRADIENT) for i in (7, 8, 9)]
    actions = run(Ladder(), [Observation(6, loss=2.0), *stream])
    assert [k for k in kinds(actions) if k[1] == "rollback"] == [(9, "rollback")]
    step, action = actions[-1]
    assert action.numbers["event_step"] == 7 and action.numbers["before"] == 8
    assert action.reason == "3 blocked steps in a row (nonfinite_gradient in grads/w)"


def test_a_restored_state_is_not_blamed_for_the_data_that_follow():
    ladder = Ladder()
    relapse(ladder, 100, 1)
    stream = [Observation(90 + i, **NAN_GRADIENT) for i in range(23)]
    assert [s for s, k in kinds(run(ladder, stream)) if k == "rollback"] == [112]


def test_good_step_between_damaged_ones_ends_the_streak():
    bad = [Observation(i, **NAN_GRADIENT) for i in range(40)]
    stream = [o if o.step % 3 else Observation(o.step, loss=1.0) for o in bad]
    assert "rollback" not in {k for _, k in kinds(run(Ladder(), stream))}


def test_blocked_loss_spikes_alone_never_roll_back():
    spike = dict(severity=BLOCK, causes=("loss_spike",), loss=9.0)
    stream = [Observation(i, **spike) for i in range(90)]
    assert {k for _, k in kinds(run(Ladder(), stream))} == {"skip", "look"}


def test_damaged_parameters_roll_back_at_once_and_name_the_leaf():
    seen = Observation(3, damaged="params/w", **NAN_GRADIENT)
    action = Ladder().decide(seen)[-1]
    assert action.kind == "rollback"
    assert action.reason == (
        "params/w is not finite, so that skipping steps is of no use "
        "(nonfinite_gradient in grads/w)"
    )


def test_damaged_parameters_without_checkpoint_stop_at_once():
    seen = Observation(3, damaged="params/w", can_roll_back=False, **NAN_GRADIENT)
    action = Ladder().decide(seen)[-1]
    assert action.kind == "stop"
    assert action.reason == (
        "params/w is not finite, so that skipping steps is of no use; there is no "
        "checkpoint to go back to"
    )


def test_without_checkpoints_a_burst_passes_and_a_lasting_block_stops():
    stream = [Observation(i, can_roll_back=False, **NAN_GRADIENT) for i in range(100)]
    done = [k for k in kinds(run(Ladder(), stream)) if k[1] in ("rollback", "stop")]
    assert done == [(99, "stop")]


def test_loss_that_stays_high_after_an_event_climbs_the_ladder(rng):
    stream = calm(100, rng)
    stream.append(Observation(100, severity=2, causes=("loss_spike",), loss=2.3))
    stream += [Observation(101 + i, loss=2.3) for i in range(70)]
    done = [k for k in kinds(run(Ladder(), stream)) if k[1] not in ("log", "look")]
    assert done[:3] == [(109, "reset"), (119, "cut"), (159, "rollback")]


def test_an_extreme_loss_rolls_back_to_before_its_first_step(rng):
    """A burst of corrupt batches that were applied: two watched, then warned of."""
    stream = calm(200, rng)
    for i, severity in enumerate((1, 1, 2, 2, 0)):
        seen = Observation(200 + i, severity, ("loss_spike",) * (severity > 0), "loss")
        stream.append(seen._replace(loss=8.8))
    actions = run(Ladder(), stream)
    step, action = actions[-1]
    assert (step, action.kind) == (204, "rollback")
    assert action.numbers["event_step"] == 200 and action.numbers["before"] == 201
    assert action.reason == "the loss stayed high for 5 steps"
    assert action.numbers["skip_more"] == 5
    done = {k for _, k in kinds(run(Ladder(), stream[:-1]))}
    assert done == {"log", "look"}


def test_random_guesses_are_extreme_on_noisy_data_too(rng):
    """Noise of 6 %: 20 deviations lie above the loss of a byte guessed at random."""
    level = LossLevel()
    noisy = 2.8 + 0.17 * rng.normal(size=500)
    assert EXTREME not in [level.observe(float(x)) for x in noisy]
    assert level.observe(math.log(256)) == EXTREME
    assert level.observe(2.8 + 9 * 0.17) == FAR


def test_a_falling_loss_does_not_hide_a_spike(rng):
    """At step 180 the loss of the last 128 steps still spans 4.2 to 2.3."""
    losses = 2.2 + 3.3 * np.exp(-np.arange(180) / 50) + rng.normal(0, 0.1, 180)
    stream = [Observation(i, loss=float(x)) for i, x in enumerate(losses)]
    stream += [Observation(180 + i, 2, loss=8.8) for i in range(5)]
    assert kinds(run(Ladder(), stream))[-1] == (184, "rollback")


def test_high_loss_without_an_event_is_no_event(rng):
    stream = calm(100, rng) + [Observation(100 + i, loss=2.3) for i in range(100)]
    assert run(Ladder(), stream) == []


def test_a_loss_that_stays_far_above_needs_no_warning(rng):
    """A slow divergence, as post-LN blocks show: twice the level, for good."""
    stream = calm(100, rng) + [Observation(100 + i, loss=4.0) for i in range(100)]
    acted = run(Ladder(), stream)
    assert acted[0][0] == 119 and "rollback" in [a.kind for _, a in acted]


def test_cut_is_bounded_and_returns_by_degrees(rng):
    rungs = (Rung("cut", severity=2, lasting_steps=40, budget=9),)
    ladder = Ladder(rungs, lowest_scale=0.2)
    scales = []
    for i in range(5):
        ladder.decide(Observation(i, severity=2, loss=1.0))
        scales.append(ladder.learning_rate_scale)
    assert scales == [0.5, 0.25, 0.2, 0.2, 0.2]
    actions = run(ladder, calm(60, rng, 5))
    assert kinds(actions) == [(44, "return")]
    assert ladder.learning_rate_scale == 1.0


def test_return_is_monotonic_and_takes_ten_values(rng):
    ladder = Ladder((Rung("cut", severity=2, lasting_steps=40),))
    ladder.decide(Observation(0, severity=2, loss=1.0))
    scales = []
    for seen in calm(60, rng, 1):
        ladder.decide(seen)
        scales.append(ladder.learning_rate_scale)
    assert scales == sorted(scales) and len(set(scales)) == 11


def test_probes_look_closer_for_a_while(rng):
    ladder = Ladder()
    ladder.decide(Observation(0, severity=2, causes=("loss_spike",)))
    levels = []
    for seen in calm(80, rng, 1):
        levels.append(ladder.probe_level)
        ladder.decide(seen)
    assert levels == [1] * 50 + [0] * 30


def relapse(ladder, at, times):
    """Fails at one place again and again, and reports each rollback as done."""
    found = []
    for n in range(times):
        ladder.decide(Observation(at - 1, loss=2.0))
        for i in range(3):
            index = at + 1000 * n + i
            seen = Observation(at + i, data_index=index, **NAN_GRADIENT)
            action = ladder.decide(seen)[-1]
        found.append(action)
        if action.kind != "rollback":
            break
        ladder.rolled_back(seen, at - 10 * (n + 1), (1000 * n, 1000 * n + 2))
    return found


def test_relapse_at_one_place_widens_then_stops_with_advice_and_evidence():
    ladder = Ladder()
    actions = relapse(ladder, 100, 9)
    assert [a.kind for a in actions] == ["rollback"] * 3 + ["stop"]
    assert [a.numbers["skip_more"] for a in actions[:3]] == [0, 100, 200]
    assert [a.numbers["before"] for a in actions[:3]] == [101, 90, 80]
    stop = actions[-1]
    assert stop.reason == (
        "3 rollbacks near step 100 did not help: 3 blocked steps in a row"
    )
    assert [e["step"] for e in stop.numbers["evidence"]] == [100, 100, 100, 102]
    assert stop.numbers["advice"][-1].startswith("resume from an older step")
    assert ladder.learning_rate_scale == 0.25  # cut at each relapse


def burst(ladder, at, good):
    """Three blocked batches, a rollback by 10 steps, and good steps beyond them."""
    for i in range(3):
        seen = Observation(at + i, data_index=at + i, **NAN_GRADIENT)
        action = ladder.decide(seen)[-1]
    if action.kind == "rollback":
        ladder.rolled_back(seen, at - 10, (at - 10, at + 2))
        run(ladder, [Observation(at - 10 + i, loss=2.0) for i in range(10 + good)])
    return action


def bursts(count, apart):
    """What a ladder says to so many bursts, with good steps in between."""
    ladder = Ladder([Rung("rollback", blocked_steps=3, causes=DAMAGE, budget=7)])
    ladder.decide(Observation(99, loss=2.0))
    return [burst(ladder, 100 + apart * i, good=apart) for i in range(count)]


def test_bad_bursts_that_the_run_gets_past_are_no_relapses():
    """Each costs budget, which is what ends a run of too many of them."""
    actions = bursts(8, apart=30)
    assert [a.kind for a in actions] == ["rollback"] * 7 + ["stop"]
    assert actions[-1].reason.startswith("the budget of 7 rollbacks is spent")
    assert {a.numbers["relapses"] for a in actions[:7]} == {0}
    assert [a.numbers["before"] for a in actions[:3]] == [101, 131, 161]
    assert actions[-1].numbers["advice"]


def test_a_run_that_fails_again_soon_has_not_got_past_the_place():
    actions = bursts(4, apart=6)
    assert [a.kind for a in actions] == ["rollback"] * 3 + ["stop"]
    assert actions[-1].reason.startswith("3 rollbacks near step 118 did not help")
    assert [a.numbers["before"] for a in actions[:3]] == [101, 90, 96]


def test_what_was_passed_is_remembered_over_a_restart():
    first, second = Ladder(), Ladder()
    first.decide(Observation(99, loss=2.0))
    burst(first, 100, good=30)
    second.set_state(json.loads(json.dumps(first.get_state())))
    second.decide(Observation(129, loss=2.0))
    assert burst(second, 130, good=0).numbers["relapses"] == 0


def test_two_different_faults_at_one_place_are_no_relapse():
    ladder = Ladder()
    relapse(ladder, 100, 1)
    ladder.decide(Observation(119, loss=2.0))
    other = dict(severity=BLOCK, causes=("activation_shift",), first="activations/mlp")
    for i in range(120, 123):
        action = ladder.decide(Observation(i, **other))[-1]
    assert action.kind == "rollback" and action.numbers["relapses"] == 0
    assert action.numbers["before"] == 121


def test_rollbacks_far_apart_are_no_relapse_but_cost_budget():
    ladder = Ladder()
    kinds_seen = [relapse(ladder, 150 * (i + 1), 1)[0].kind for i in range(6)]
    assert kinds_seen == ["rollback"] * 5 + ["stop"]


def test_new_ground_gives_budget_back_and_redone_steps_do_not(rng):
    ladder = Ladder()
    for i in range(5):
        assert relapse(ladder, 150 * (i + 1), 1)[0].kind == "rollback"
    for seen in calm(500, rng, 300) * 4:  # the same steps again and again
        ladder.decide(seen)
    assert relapse(ladder, 900, 1)[0].kind == "stop"
    for seen in calm(1400, rng, 903):
        ladder.decide(seen)
    assert relapse(ladder, 2500, 1)[0].kind == "rollback"


def test_two_processes_with_the_same_observations_decide_the_same(rng):
    stream = calm(200, rng)
    for i in (60, 61, 62, 130):
        stream[i] = Observation(i, **NAN_GRADIENT)
    assert run(Ladder(), stream) == run(Ladder(), stream)


def test_state_survives_json_and_decides_on_as_before(rng):
    first = Ladder()
    relapse(first, 100, 2)
    for seen in calm(50, rng, 103):
        first.decide(seen)
    second = Ladder()
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert second.learning_rate_scale == first.learning_rate_scale
    rest = calm(40, rng, 153) + [Observation(193 + i, **NAN_GRADIENT) for i in range(3)]
    assert run(second, rest) == run(first, rest)


def test_observe_reports_everything_and_does_nothing():
    ladder = observe()
    stream = [Observation(i, damaged="params/w", **NAN_GRADIENT) for i in range(120)]
    actions = run(ladder, stream)
    acted = {a.kind for _, a in actions if not a.report_only}
    assert acted == {"skip"}
    assert {"rollback"} <= {a.kind for _, a in actions if a.report_only}
    assert ladder.learning_rate_scale == 1.0 and ladder.probe_level == 0


def test_report_only_rollback_is_written_once_in_fifty_steps():
    rungs = (Rung("rollback", blocked_steps=3, report_only=True, budget=99),)
    stream = [Observation(i, **NAN_GRADIENT) for i in range(1, 104)]
    actions = run(Ladder(rungs), [Observation(0, loss=2.0), *stream])
    assert [s for s, a in actions if a.kind == "rollback"] == [3, 53, 103]


def test_presets_differ_in_what_they_dare(rng):
    stream = calm(100, rng)
    stream.append(Observation(100, severity=2, causes=("loss_spike",), loss=2.3))
    stream += [Observation(101 + i, loss=2.3) for i in range(70)]
    acts = {k for _, k in kinds(run(careful(), stream))}
    assert acts == {"log", "look"}
    assert len(relapse(careful(), 100, 9)) == 3
    assert len(relapse(unattended(), 100, 9)) == 5


def test_a_parameter_that_leapt_before_the_first_step_is_fetched_once():
    """What blocks from the start is data, but for a leap, which is tried once."""
    for cause, due in (("parameter_leap", 2), ("nonfinite_gradient", 22)):
        ladder, bad = Ladder(), dict(severity=BLOCK, causes=(cause,))
        stream = [Observation(i, **bad) for i in range(due + 1)]
        acted = [k for k in kinds(run(ladder, stream)) if k[1] == "rollback"]
        assert acted == [(due, "rollback")]
        ladder.rolled_back(stream[-1], 0, (0, due))
        again = kinds(run(ladder, stream[:22]))
        assert "rollback" not in {k for _, k in again}


def test_a_state_is_worth_keeping_only_once_an_event_is_over(rng):
    ladder, settled = Ladder(quiet_steps=10), []
    losses = [2.0] * 60 + [9.0] * 3 + [2.0] * 20
    severities = {60: 1, 61: 2}  # the third high loss has no verdict, the first a WATCH
    for i, loss in enumerate(losses):
        noisy = loss + rng.normal(0, 0.02)
        ladder.decide(Observation(i, severities.get(i, 0), loss=noisy))
        settled.append(ladder.is_settled)
    assert settled == [True] * 60 + [False] * 12 + [True] * 11
    ladder.decide(Observation(83, loss=9.0))  # no event, and no state to keep either
    assert not ladder.is_settled and not ladder.event_open


def test_announced_change_re_learns_the_level(rng):
    ladder = Ladder()
    run(ladder, calm(100, rng))
    ladder.expect_change()
    stream = [Observation(100, severity=2, causes=("loss_spike",), loss=6.0)]
    stream += calm(100, rng, 101, level=6.0)
    assert {k for _, k in kinds(run(ladder, stream))} == {"log", "look"}


def test_nonfinite_loss_never_enters_the_level(rng):
    ladder = Ladder()
    stream = calm(64, rng)
    stream += [Observation(64 + i, loss=x) for i, x in enumerate([math.nan, math.inf])]
    run(ladder, stream)
    assert np.all(np.isfinite(ladder.get_state()["level"]))


def test_lasting_report_only_shift_is_relearnt(rng):
    ladder = observe()
    run(ladder, calm(100, rng))
    stream = [Observation(100, severity=2, loss=5.0)] + calm(500, rng, 101, level=5.0)
    run(ladder, stream)
    assert not ladder.in_trouble and not ladder.event_open


def test_decision_costs_microseconds_and_memory_stays_flat(rng):
    ladder = Ladder()
    stream = calm(20_000, rng)
    begun = time.perf_counter()
    run(ladder, stream[:10_000])
    seconds = time.perf_counter() - begun
    size = len(json.dumps(ladder.get_state()))
    run(ladder, stream[10_000:])
    assert seconds / 10_000 < 1e-3  # measured: 2e-5 on an idle machine
    assert len(json.dumps(ladder.get_state())) < 1.1 * size + 100


def test_advice_fits_the_place():
    lines = advise([{"causes": ["nonfinite_activation"], "first": "block_3/attn"}])
    assert lines[0].startswith("normalise queries and keys (QK-norm)")
    lines = advise([{"causes": [], "first": "wte/embedding"}])
    assert lines[0].startswith("scale the embedding's output")
    lines = advise([{"causes": [], "first": "activations/lm_head"}])
    assert lines[0] == "add a z-loss to the output logits"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: Ladder(["rollback"]),
            TypeError,
            "Ladder: needed a Rung at position 0 of rungs, got 'rollback'; write "
            'stabil.policy.Rung("rollback", blocked_steps=3)',
        ),
        (
            lambda: Ladder([Rung("skip", severity=3)]),
            ValueError,
            "Ladder: needed one of look, reset, cut, rollback, stop as kind of rung 0, "
            "got 'skip'; clips and skips are the guard's and need no rung",
        ),
        (
            lambda: Ladder([Rung("cut")]),
            ValueError,
            "Ladder: needed a trigger for rung 0 (cut), got none; set blocked_steps, "
            "high_loss_steps, extreme_loss_steps, drifted_steps or severity",
        ),
        (
            lambda: Ladder([Rung("cut", severity=2, amount=1.0)]),
            ValueError,
            "Ladder: needed 0 < amount < 1 for rung 0 (cut), got 1.0; 0.5 halves the "
            "learning rate",
        ),
        (
            lambda: Ladder([Rung("cut", severity=2, budget=0)]),
            ValueError,
            "Ladder: needed budget, budget_steps and lasting_steps of at least 1 for "
            "rung 0 (cut), got 0, 1000 and 200; leave the rung out to forbid it",
        ),
        (
            lambda: Ladder(quiet_steps=0),
            ValueError,
            "Ladder: needed quiet_steps >= 1, got 0",
        ),
        (
            lambda: Ladder(lowest_scale=1.0),
            ValueError,
            "Ladder: needed 0 < lowest_scale < 1, got 1.0; 0.1 lets the learning rate "
            "fall to a tenth",
        ),
    ],
)
def test_errors_say_what_to_write(make, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        make()


def test_a_rollback_takes_the_level_of_that_time_along():
    """A loss that is normal for an early state is no event after a rollback to it."""
    ladder, saved = Ladder(), {}
    losses = [6 * 0.98**i + 0.01 * (i % 2) for i in range(100)]
    for step, loss in enumerate(losses):
        saved[step] = ladder.get_state()
        ladder.decide(Observation(step, loss=loss))
    bad = Observation(100, loss=1.0, severity=2, causes=("nonfinite_parameter",))
    assert ladder.decide(bad)[-1].kind == "rollback"
    ladder.rolled_back(bad, 10, (10, 100), saved[10])
    again = [ladder.decide(Observation(i, loss=losses[i])) for i in range(10, 100)]
    assert not any(again)
