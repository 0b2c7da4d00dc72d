"""`stabil lint`: exit codes, text and JSON."""

import json
import re

import numpy as np

from stabil.cli import main


def write_log(path, spike=True, first=2.3):
    rng = np.random.default_rng(0)
    losses = np.geomspace(first, 2.0, 300) * np.exp(0.01 * rng.normal(size=300))
    if spike:
        losses[200:206] *= 2.2
    path.write_text("step,loss\n" + "\n".join(f"{i},{x}" for i, x in enumerate(losses)))
    return str(path)


def test_clean_log(tmp_path, capsys):
    log = write_log(tmp_path / "clean.csv", spike=False)
    assert main(["lint", log]) == 0
    out = capsys.readouterr().out
    assert f"{log}: 300 rows, steps 0 to 299 (csv: loss, no gradient norm)" in out
    assert "  0 findings\n" in out


def test_findings_in_text_json_and_picture(tmp_path, capsys):
    log, png = write_log(tmp_path / "run.csv"), tmp_path / "run.png"
    assert main(["lint", log, "--png", str(png)]) == 1
    assert "  warn spike at 200, peak 2" in capsys.readouterr().out
    assert png.exists()
    assert main(["lint", log, log, "--json"]) == 1
    whole = json.loads(capsys.readouterr().out)
    assert whole["exit_code"] == 1 and len(whole["logs"]) == 2
    assert whole["logs"][0]["events"][0]["kind"] == "spike"


def test_malformed_lines_are_told_with_their_number(tmp_path, capsys):
    log = write_log(tmp_path / "run.csv", spike=False)
    with open(log, "a") as file:
        file.write("\n300\n301,2.0\n")
    assert main(["lint", log]) == 1
    streams = capsys.readouterr()
    assert streams.err == f"{log}:302: 2 cells needed, 1 found\n"
    assert "301 rows" in streams.out


def test_unreadable_logs_do_not_stop_the_others(tmp_path, capsys):
    log = write_log(tmp_path / "run.csv")
    assert main(["lint", str(tmp_path / "none.csv"), log, "--json"]) == 2
    streams = capsys.readouterr()
    whole = json.loads(streams.out)
    assert "No such file" in whole["logs"][0]["error"]
    assert whole["logs"][1]["rows"] == 300
    assert streams.err.startswith("stabil lint: ")


def test_calibration_is_made_and_held_against(tmp_path, capsys):
    base = write_log(tmp_path / "base.csv", spike=False, first=2.0)
    out = str(tmp_path / "c.json")
    assert main(["calibrate", base, "--out", out]) == 0
    assert f"written to {out}" in capsys.readouterr().out
    assert main(["lint", base, "--calibration", out]) == 0
    with open(base, "a") as file:
        file.write("\n300,900.0\n")
    capsys.readouterr()
    assert main(["lint", base, "--calibration", out]) == 1
    limit = r"  warn limit at 300, peak 45\dx at 300: loss\n"
    said = capsys.readouterr().out
    assert re.search(limit, said)
    assert "  calibration: 1 of 1 signals beyond their limit\n" in said
    assert main(["calibrate", base, "--out", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["signals"]["loss"]["limit"] > 100
    assert main(["lint", base, "--calibration", base]) == 2


def test_logs_of_like_runs_are_held_against_each_other(tmp_path, capsys):
    paths = []
    for rank in range(4):
        path = tmp_path / f"rank_{rank}.log"
        rows = [f"step {i} loss {3 + 0.01 * (i % 5 + rank)}" for i in range(80)]
        if rank == 2:
            rows += ["ERROR link 1 down", "ERROR link 2 down"]
            rows[40:60] = [f"step {i} loss 30.0" for i in range(40, 60)]
        path.write_text("\n".join(rows))
        paths.append(str(path))
    assert main(["lint", "--together", *paths]) == 1
    out = capsys.readouterr().out
    assert f"{paths[2]} departs: loss from step 40 to 59" in out
    assert f"{paths[2]} alone says: ERROR link <*> down (2 lines from 81 on)" in out
    assert main(["lint", "--together", "--json", *paths]) == 1
    found = json.loads(capsys.readouterr().out)["departures"]
    assert [one["log"] for one in found] == [paths[2], paths[2]]
