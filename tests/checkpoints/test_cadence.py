"""When a checkpoint is due."""

from stabil.checkpoints._cadence import Cadence


def test_steps_or_minutes_whichever_comes_first():
    now = [0.0]
    cadence = Cadence(500, 15, clock=lambda: now[0])
    assert cadence.due(3)
    cadence.saved(3)
    assert not cadence.due(499) and cadence.due(500) and cadence.due(501)
    cadence.saved(500)
    now[0] = 899.0
    assert not cadence.due(740)
    now[0] = 900.0
    assert cadence.due(740)
    cadence.saved(740)
    # A save by the clock does not move the steps at which saves fall.
    assert not cadence.due(999) and cadence.due(1000)


def test_a_rollback_counts_from_its_target():
    cadence = Cadence(10, None)
    cadence.saved(40)
    assert not cadence.due(30)
    cadence.saved(20)
    assert cadence.due(30) and not cadence.due(29)
