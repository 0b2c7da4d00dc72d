"""The process that departs from the others."""

import re

import numpy as np
import pytest

from stabil.curves import departures


def healthy(rng, rows=100, processes=8):
    shared = 2 + 0.2 * rng.normal(size=(rows, 1))
    return shared + 0.05 * rng.normal(size=(rows, processes))


def test_healthy_processes_do_not_depart(rng):
    for processes in (1, 2, 3, 8, 64):
        assert departures(healthy(rng, processes=processes)) == []


def test_the_departing_process_and_its_first_row(rng):
    table = healthy(rng)
    table[40:, 5] += 3
    table[10, 1] += 3
    (found,) = departures(table)
    assert (found.process, found.first_row, found.rows) == (5, 40, 60)
    assert found.score > 8


def test_a_process_that_alone_is_not_finite_departs(rng):
    table = healthy(rng)
    table[30:40, 2] = np.nan
    table[60:80] = np.nan
    (found,) = departures(table)
    assert (found.process, found.first_row, found.rows) == (2, 30, 10)


def test_shared_events_are_nobodys_fault(rng):
    table = healthy(rng)
    table[50:60] *= 20
    assert departures(table) == []


def test_wrong_shape_is_explained():
    text = (
        "departures: needed a table [rows, processes], got shape (3,); write "
        "np.stack(values, axis=1)"
    )
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        departures(np.ones(3))
