"""Which of several logs departs, in what, and since when."""

import json

import numpy as np
import pytest

from stabil.curves import compare_logs

SIGNALS = ("loss", "activations/block_0/absmax", "activations/block_1/absmax")


def write(folder, rng, logs=5, rows=200, edit=None):
    """Logs of the processes of one run, with noise of their own."""
    shared = 3 * np.exp(-np.arange(rows) / 100)[:, None, None]
    table = (1 + shared) * np.exp(0.05 * rng.normal(size=(rows, logs, len(SIGNALS))))
    if edit is not None:
        edit(table)
    paths = []
    for log in range(logs):
        path = folder / f"rank_{log}.jsonl"
        with open(path, "w") as file:
            for i, row in enumerate(table[:, log]):
                plain = [x if np.isfinite(x) else None for x in row.tolist()]
                record = dict(zip(SIGNALS, plain, strict=True), step=10 * i)
                file.write(json.dumps(record) + "\n")
        paths.append(path)
    return paths


def test_like_logs_do_not_depart(tmp_path, rng):
    assert compare_logs(write(tmp_path, rng)) == []


def test_rank_layer_and_step_are_named_in_order(tmp_path, rng):
    def edit(table):
        table[120:, 3, 2] *= 4  # block_1 of rank 3
        table[125:, 3, 0] *= 3  # and then its loss
        table[60:62, 1] *= 9  # too short to count
        table[150:160, 0, 1] = np.nan

    found = compare_logs(write(tmp_path, rng, edit=edit))
    assert [(d.log, d.signal, d.step) for d in found] == [
        (3, SIGNALS[2], 1200),
        (3, SIGNALS[0], 1250),
        (0, SIGNALS[1], 1500),
    ]
    assert found[0].last == 1990 and found[2].score == np.inf


def test_long_logs_are_thinned_by_their_steps(tmp_path, rng):
    def edit(table):
        table[12_000:, 1, 0] *= 5

    paths = write(tmp_path, rng, logs=3, rows=20_000, edit=edit)
    (found,) = compare_logs(paths)
    assert found.log == 1 and abs(found.step - 120_000) < 200


def test_two_logs_cannot_say(tmp_path, rng):
    with pytest.raises(ValueError, match="needed three logs or more to tell which"):
        compare_logs(write(tmp_path, rng, logs=2))
