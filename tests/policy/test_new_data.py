"""Data that change for good become the new level; bad data that end are left out."""

import json

import numpy as np

from stabil.policy import Ladder, Observation, unattended

SHIFT = 200


def play(ladder, loss_at, steps=400, save_every=20, swap=None):
    """A run whose state goes back when asked to, and whose data are skipped then.

    `loss_at(data)` is the loss of a healthy state on the batch at that position. Shows
    the actions that change something, and log lines about the data.
    """
    rng, step, data, found = np.random.default_rng(0), 0, 0, []
    for _ in range(10 * steps):
        if step >= steps:
            break
        loss = loss_at(data) + rng.normal(0, 0.02)
        high = loss > 2.3
        seen = Observation(
            step,
            2 if high else 0,
            ("loss_spike",) if high else (),
            "loss" if high else None,
            loss,
            data_index=data,
        )
        for action in ladder.decide(seen):
            if action.kind == "log" and "data have changed" in action.reason:
                found.append((step, "accept"))
            if action.kind in ("rollback", "stop"):
                found.append((step, action.kind))
            if action.kind == "stop":
                return found, step
            if action.kind == "rollback":
                target = min(action.numbers["before"], step) // save_every * save_every
                ladder.rolled_back(seen, target, (data,))
                data += action.numbers["skip_more"]
                step = target - 1
                if swap is not None:
                    ladder = swap(ladder)
        step, data = step + 1, data + 1
    return found, step


def test_data_that_change_for_good_are_accepted_after_one_more_try():
    for ladder in (Ladder(), unattended()):
        found, step = play(ladder, lambda data: 2.0 if data < SHIFT else 3.5)
        assert [kind for _, kind in found] == ["rollback", "rollback", "accept"]
        assert step == 400
        assert found[2] == (SHIFT + 2, "accept")  # third step of the restored state


def test_bad_data_that_end_are_left_out_and_nothing_is_accepted():
    found, step = play(
        Ladder(), lambda data: 3.5 if SHIFT <= data < SHIFT + 40 else 2.0
    )
    assert [kind for _, kind in found] == ["rollback", "rollback"] and step == 400


def test_a_state_that_goes_wrong_after_a_while_is_no_change_of_the_data():
    ladder = Ladder()
    for n in range(4):
        first = 100 if n else 0
        for i in range(first, 210):
            loss = 2.0 + 0.02 * (i % 3) if i < 200 else 3.5
            seen = Observation(i, 2 * (i >= 200), ("loss_spike",), "loss", loss)
            actions = ladder.decide(seen)
            assert not any("data have changed" in a.reason for a in actions)
            if actions and actions[-1].kind in ("rollback", "stop"):
                break
        if actions[-1].kind == "rollback":
            ladder.rolled_back(seen, 100, (i,))
    assert actions[-1].kind == "stop"


def test_the_question_survives_a_restart():
    def swap(ladder):
        other = Ladder()
        other.set_state(json.loads(json.dumps(ladder.get_state())))
        return other

    found, _ = play(Ladder(), lambda d: 2.0 if d < SHIFT else 3.5, swap=swap)
    assert [kind for _, kind in found] == ["rollback", "rollback", "accept"]
