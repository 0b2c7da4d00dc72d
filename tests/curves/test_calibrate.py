"""Typical ranges of a baseline, their file, and what leaves them."""

import json
import re

import numpy as np
import pytest

from stabil.curves import calibrate, load_calibration, past_limits, save_calibration


def write_log(path, rng, rows=400, **factors):
    lines = []
    for i in range(rows):
        record = {
            "step": 10 * i,
            "loss": 2 + 0.02 * rng.normal(),
            "activations/block_0/mlp/absmax": 5 * np.exp(0.1 * rng.normal()),
            "activations/block_1/mlp/absmax": 40 * np.exp(0.1 * rng.normal()),
            "note": "text",
        }
        for name, (at, factor) in factors.items():
            if i >= at:
                record[f"activations/{name}/mlp/absmax"] *= factor
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines))
    return path


def test_ranges_equal_numpy(tmp_path, rng):
    path = write_log(tmp_path / "base.jsonl", rng)
    ranges = calibrate(path)
    assert list(ranges) == [
        "loss",
        "activations/block_0/mlp/absmax",
        "activations/block_1/mlp/absmax",
    ]
    records = [json.loads(line) for line in path.read_text().split("\n")]
    for name, found in ranges.items():
        values = np.array([r[name] for r in records])
        late = values[200:]
        np.testing.assert_allclose(found.typical, np.median(np.abs(late)))
        away = np.median(np.abs(late - np.median(late)))
        np.testing.assert_allclose(found.noise, 1.482602218505602 * away)
        np.testing.assert_allclose(found.largest, np.abs(values).max())
        np.testing.assert_allclose(found.limit, 100 * found.typical)
        assert np.mean(late < found.low) <= 0.01 and np.mean(late > found.high) <= 0.01


def test_the_file_is_readable_and_comes_back(tmp_path, rng):
    ranges = calibrate(write_log(tmp_path / "base.jsonl", rng))
    save_calibration(ranges, tmp_path / "c.json", source="base.jsonl")
    assert load_calibration(tmp_path / "c.json") == ranges
    text = (tmp_path / "c.json").read_text()
    assert json.loads(text)["made_by"] == "stabil calibrate"
    assert len(text.split("\n")) == 11
    other = tmp_path / "other.json"
    other.write_text("{}")
    text = (
        f"{other}: needed a calibration, got another file ('signals'); write stabil "
        "calibrate LOG --out FILE"
    )
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        load_calibration(other)


def test_limits_are_per_layer(tmp_path, rng):
    ranges = calibrate(write_log(tmp_path / "base.jsonl", rng))
    assert past_limits(write_log(tmp_path / "same.jsonl", rng), ranges) == []
    ill = write_log(tmp_path / "ill.jsonl", rng, block_0=(300, 200), block_1=(0, 20))
    ((name, event),) = past_limits(ill, ranges)
    assert name == "activations/block_0/mlp/absmax"
    assert (event.kind, event.severity, event.start, event.end) == (
        "limit",
        2,
        3000,
        3990,
    )
    assert 200 < event.height < 400


def test_long_logs_are_thinned(tmp_path, rng):
    path = tmp_path / "long.csv"
    values = np.exp(rng.normal(size=20_000))
    path.write_text("loss\n" + "\n".join(map(str, values)))
    found = calibrate(path)["loss"]
    np.testing.assert_allclose(found.typical, np.median(values), rtol=0.1)
    assert found.largest == values.max()
