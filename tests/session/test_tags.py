"""Only later steps make a checkpoint healthy."""

import numpy as np
import pytest
from fake_run import FakeKeeper, make_vitals

import stabil
from stabil.session._tags import HealthTags


def saved(keeper, step):
    keeper.save(step, np.zeros(1), force=True)
    tags = HealthTags(keeper, 4)
    tags.saved(step)
    return tags


def observe(tags, pattern):
    for mark in pattern:
        tags.observe(5, mark == "x", "loss_spike")


def test_clean_steps_make_a_step_healthy(keeper):
    tags = saved(keeper, 5)
    observe(tags, "...")
    assert keeper.tags[5] == "pending"
    observe(tags, ".")
    assert keeper.tags[5] == "healthy"
    assert keeper.causes[5] == "survived 4 later steps"
    observe(tags, "xxx")  # what comes later is not this step's fault
    assert keeper.tags[5] == "healthy"


def test_the_step_before_counts_only_against_it(keeper):
    tags = saved(keeper, 5)
    for _ in range(9):
        tags.observe(4, False, "")
    assert keeper.tags[5] == "pending"
    tags.observe(4, True, "loss_spike")
    assert keeper.tags[5] == "suspect"


def test_trouble_before_that_makes_it_suspect_until_it_has_proved_itself(keeper):
    tags = saved(keeper, 5)
    observe(tags, "..x")
    assert keeper.tags[5] == "suspect" and keeper.causes[5] == "loss_spike"
    observe(tags, "...x...")
    assert keeper.tags[5] == "suspect"
    observe(tags, ".")
    assert keeper.tags[5] == "healthy"


def test_noisy_data_do_not_lock_a_run_out_of_healthy_steps(keeper):
    tags = saved(keeper, 5)
    observe(tags, "...x...x" * 5)
    assert keeper.tags[5] == "suspect"  # one in four is too many
    tags = HealthTags(keeper, 5)
    tags.saved(5)
    observe(tags, "....x" * 10)
    assert keeper.tags[5] == "suspect"  # one in five as well
    tags = HealthTags(keeper, 8)
    keeper.save_every = 8
    tags = HealthTags(keeper, 8)
    tags.saved(5)
    observe(tags, ".....x" * 14)
    assert keeper.tags[5] == "healthy"


def test_what_was_saved_amid_an_event_is_not_proved_by_its_end(keeper):
    def observe(tags, pattern):
        for mark in pattern:
            tags.observe(5, mark == "x", "loss_spike", in_event=mark != ".")

    keeper.save(5, np.zeros(1), force=True)
    tags = HealthTags(keeper, 4)
    tags.saved(5, in_event=True)
    observe(tags, "ooooo")
    assert keeper.tags[5] == "pending"
    observe(tags, ".....")
    assert keeper.tags[5] == "suspect"
    # An event that never ends is noise.
    tags.saved(5, in_event=True)
    observe(tags, "ooooooooox" * 4)
    assert keeper.tags[5] == "healthy"
    keeper.mark(5, "pending")
    tags.saved(5, in_event=True)
    tags.finish()
    assert keeper.tags[5] == "pending"


def test_the_number_shrinks_with_a_short_cadence(keeper):
    keeper.save_every = 3
    assert HealthTags(keeper, 20).after_steps == 3
    keeper.save_every = 500
    assert HealthTags(keeper, 20).after_steps == 20


def test_steps_that_the_keeper_has_dropped_are_forgotten(keeper):
    tags = saved(keeper, 5)
    del keeper.saved[5]
    observe(tags, "x....")  # marks nothing and raises nothing
    tags.saved(9)
    tags.rolled_back(7)
    tags.finish()
    assert 9 not in keeper.causes


def test_a_verdict_that_the_disk_refused_is_given_again(keeper, monkeypatch):
    tags = saved(keeper, 5)

    def refuse(*args):
        raise OSError("disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(keeper, "mark", refuse)
        observe(tags, "....")
        assert str(tags.take_problem()) == "disk is full"
        observe(tags, ".")
    # Told once, for a full disk says so at every step.
    assert tags.take_problem() is None and keeper.tags[5] == "pending"
    observe(tags, ".")
    assert keeper.tags[5] == "healthy" and tags.take_problem() is None


@pytest.mark.parametrize("growth", [0.0, 0.002])
def test_a_run_that_ends_while_its_loss_rises_ends_on_no_healthy_step(tmp_path, growth):
    keeper, rng = FakeKeeper(save_every=1000), np.random.default_rng(0)
    losses = np.exp(growth * np.maximum(np.arange(400) - 200, 0))
    losses *= 1.5 + 0.1 * rng.normal(size=400)
    with stabil.Session(
        tmp_path, checkpoints=keeper, total_steps=400, progress=False
    ) as session:
        for step, _ in session.steps(0, lambda i: i):
            session.end_step(0, make_vitals(loss=losses[step]))
    assert keeper.tags[0] == "healthy"
    assert (keeper.tags[400] == "healthy") == (growth == 0)
