"""`stabil demo`: the report of a small run, its parts, and what it refuses."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stabil.cli import _demo, _demo_data, _demo_faults, _demo_model, _demo_report, main
from stabil.cli._demo_report import Rollback, Seen
from stabil.cli._output import Progress, print_json, table
from stabil.vocabulary import Cause, Severity

SMALL = _demo_model.Size(layers=2, width=32, heads=2, context=64, batch=8, peak=5e-3)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Report of three small runs, and their folder."""
    folder = tmp_path_factory.mktemp("demo")
    lines = []

    class Lines:
        def show(self, text, last=False):
            lines.append(text)

    with jax.numpy_dtype_promotion("standard"):
        report = _demo.make_report(
            SMALL, steps=1000, seed=0, folder=folder, picture=True, progress=Lines()
        )
    return report, folder, lines


def test_the_protected_run_holds_and_the_other_is_ruined(demo):
    report, _, _ = demo
    assert report["passed"] and report["checks"]["within_1_percent"]
    assert report["runs"]["protected"]["nonfinite_parameter_steps"] == 0
    assert report["runs"]["unprotected"]["nonfinite_parameter_steps"] == 80
    assert not np.isfinite(report["runs"]["unprotected"]["final_loss"])


def test_every_fault_is_named_at_its_step_and_layer(demo):
    report, _, _ = demo
    assert [(row["title"], row["named_rightly"]) for row in report["faults"]] == [
        ("corrupted batches", True),
        ("gradient outlier", True),
        ("moment overwritten", True),
        ("weights x 100", True),
        ("NaN in activations", True),
    ]
    lost = {row["title"]: row["steps_lost"] for row in report["faults"]}
    for title in ("gradient outlier", "moment overwritten", "NaN in activations"):
        assert lost[title] <= 1
    assert lost["corrupted batches"] <= 8  # as many as there are
    assert report["runs"]["protected"]["rollbacks"] == 1  # for the weights


def test_files_of_the_run(demo):
    report, folder, _ = demo
    written = json.loads((folder / "report.json").read_text())
    assert written["runs"]["protected"] == report["runs"]["protected"]
    assert written["runs"]["unprotected"]["final_loss"] is None
    picture = pathlib.Path(report["picture"]).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


def test_text_and_json_tell_the_same(demo, capsys):
    report, _, _ = demo
    text = _demo_report.as_text(report)
    assert f"{report['runs']['protected']['final_loss']:.4f}" in text
    assert "5 of 5 faults were named rightly" in text
    print_json(report)
    assert json.loads(capsys.readouterr().out)["checks"]["faults_planted"] == 5


def test_progress_goes_on_throughout(demo):
    _, _, lines = demo
    runs = [line.split(",")[0] for line in lines]
    assert runs == sorted(runs)
    for number in (1, 2, 3):
        assert runs.count(f"run {number} of 3") >= 100


def test_the_model_has_about_a_million_parameters():
    size = _demo_model.Size()
    tokens = jnp.zeros([1, size.context], jnp.int32)
    shapes = jax.eval_shape(_demo_model.Gpt(size).init, jax.random.key(0), tokens)
    assert 0.9e6 < sum(x.size for x in jax.tree.leaves(shapes)) < 1.1e6


def test_any_batch_can_be_drawn_again():
    corpus = _demo_data.read_corpus()
    assert len(corpus.train) > 1_000_000 and len(corpus.held_out) > 50_000
    first = _demo_data.batch_at(corpus, SMALL, 3, 17)
    again = _demo_data.batch_at(corpus, SMALL, 3, 17)
    assert first["tokens"].shape == (8, 65) and first["tokens"].dtype == np.uint8
    assert np.array_equal(first["tokens"], again["tokens"])
    other = _demo_data.batch_at(corpus, SMALL, 3, 18)
    assert not np.array_equal(first["tokens"], other["tokens"])


def test_a_python_without_sources_is_told(tmp_path):
    message = (
        "needed at least 20 .py files of Python's standard library to train on, got 0 "
        f"in {tmp_path}; run the demo with a Python that ships its sources, for "
        "example one from python.org or your distribution"
    )
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(message)}$"):
        _demo_data.read_corpus(tmp_path)


def seen(step, position, severity=0, flags=0, first=None):
    return Seen(step, position, severity, flags, first, clipped=False, resets=0)


def test_a_fault_named_late_or_elsewhere_is_not_named_rightly():
    plan = _demo_faults.plan(500, 5, 0)[3:4]  # weights of block_2/mlp, position 410
    spike = int(Cause.LOSS_SPIKE)
    watch = int(Severity.WATCH)
    right = seen(410, 410, watch, spike, "activations/block_2/mlp/up")
    late = seen(411, 411, watch, spike, "activations/block_2/mlp/up")
    elsewhere = seen(410, 410, watch, spike, "activations/block_3/mlp/up")
    for alarm, rightly in ((right, True), (late, False), (elsewhere, False)):
        (row,) = _demo_report.fault_rows(
            plan, [seen(409, 409), seen(410, 410), alarm], []
        )
        assert row["named_rightly"] is rightly
    (row,) = _demo_report.fault_rows(plan, [seen(410, 410)], [])
    assert row["named"] is None and row["named_rightly"] is False


def test_steps_lost_are_skips_and_steps_done_twice():
    plan = _demo_faults.plan(500, 5, 0)[3:4]
    block = int(Severity.BLOCK)
    rows = [seen(s, s, block, 1, "activations/block_2/mlp/up") for s in (410, 411)]
    (row,) = _demo_report.fault_rows(plan, rows, [Rollback(412, 384, 411)])
    assert (row["skips"], row["rollbacks"], row["steps_lost"]) == (2, 1, 28)


@pytest.mark.parametrize(
    ("final", "holds"),
    [(1.02, False), (1.009, True), (0.98, True), (np.nan, False), (np.inf, False)],
)
def test_a_run_that_ends_above_the_clean_one_fails(final, holds):
    runs = {
        "clean": {"final_loss": 1.0},
        "protected": {
            "final_loss": final,
            "nonfinite_parameter_steps": 0,
            "stopped": None,
        },
    }
    assert _demo_report.verdict(runs, [])["within_1_percent"] is holds


def test_the_exit_code_is_1_when_the_run_did_not_hold(monkeypatch, capsys, tmp_path):
    report = {"passed": False, "loss": float("nan")}
    monkeypatch.setattr(_demo, "make_report", lambda *_, **__: report)
    assert main(["demo", "--json", "--run-dir", str(tmp_path / "run")]) == 1
    assert json.loads(capsys.readouterr().out) == {"passed": False, "loss": None}


def test_bad_arguments(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["demo", "--run-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"stabil demo: needed an empty or new folder for --run-dir, got {tmp_path}, "
        "which holds something; write another name, or leave --run-dir out\n"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    assert main(["demo", "--steps", "50", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == (
        "needed --steps of at least 200, got 50: with fewer, the faults strike before "
        "the run knows what is normal; write stabil demo --steps 200"
    )
    assert main(["demo", "--seed", "-1"]) == 2
    assert capsys.readouterr().err == (
        "stabil demo: needed --seed of at least 0, got -1\n"
    )


def test_tables_and_progress_lines(capsys):
    assert table(["a", "bb"], [["x", 1], ["yy", 22]]) == "a   bb\nx    1\nyy  22"
    progress = Progress(every_seconds=1000.0)
    for i in range(5):
        progress.show(f"line {i}")
    progress.show("the end", last=True)
    assert capsys.readouterr().err == "line 0\nthe end\n"
