"""`stabil checkpoints`: output, JSON and exit codes."""

import json

import jax.numpy as jnp
import pytest

from stabil import checkpoints
from stabil.cli import main


@pytest.fixture
def run(tmp_path):
    """A run folder with steps 1 healthy, 2 pending and 3 not finite."""
    with checkpoints.Keeper(
        tmp_path / "checkpoints", save_every=1, save_every_minutes=None
    ) as keeper:
        for step, value in ((1, 1.0), (2, 2.0), (3, jnp.nan)):
            keeper.save(step, {"w": jnp.full([3], value)}, force=True)
            keeper.wait()
            if step == 1:
                keeper.mark(1, "healthy", "calm")
    return tmp_path


def ask(capsys, *words):
    """Exit code and the one JSON object on the standard output."""
    code = main([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_ls(run, capsys):
    code, found = ask(capsys, "checkpoints", "ls", run)
    tags = {row["step"]: row["tag"] for row in found["steps"]}
    assert (code, tags) == (0, {1: "healthy", 2: "pending", 3: "suspect"})
    assert main(["checkpoints", "ls", str(run / "checkpoints")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "tag", "MB", "saved", "by", "cause"]
    assert lines[1].split()[:2] == ["1", "healthy"] and lines[1].endswith("calm")
    assert len(lines) == 4


def test_mark_and_what_it_refuses(run, capsys):
    assert ask(capsys, "checkpoints", "mark", run, 2, "healthy") == (
        0,
        {"step": 2, "tag": "healthy", "asked": "healthy", "taken": True},
    )
    code, found = ask(capsys, "checkpoints", "mark", run, 3, "healthy")
    assert (code, found["tag"]) == (1, "suspect")
    assert main(["checkpoints", "mark", str(run), "3", "healthy"]) == 1
    said = capsys.readouterr().out
    assert said == "step 3 is suspect, not healthy: it holds non-finite entries\n"


def test_verify_finds_damage(run, capsys):
    code, found = ask(capsys, "checkpoints", "verify", run)
    assert (code, found["damaged"]) == (0, [])
    for path in (run / "checkpoints" / "2").rglob("*"):
        if path.is_file() and "d" in path.parent.name and path.stat().st_size > 0:
            path.write_bytes(b"\0" * path.stat().st_size)
    code, found = ask(capsys, "checkpoints", "verify", run)
    assert (code, found["damaged"]) == (1, [2])
    code, found = ask(capsys, "checkpoints", "verify", run, "--step", 1)
    assert (code, [row["step"] for row in found["steps"]]) == (0, [1])


def test_diff(run, capsys):
    code, found = ask(capsys, "checkpoints", "diff", run, 1, 2)
    (leaf,) = found["leaves"]
    assert code == 1
    assert (leaf["name"], leaf["entries"], leaf["largest"]) == ("w", 3, 1.0)
    assert found["metadata"] == ["tag: healthy in step 1, pending in step 2"]
    assert main(["checkpoints", "diff", str(run), "1", "3"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1].split() == ["w", *2 * ["float32[3]"], "3/3", "nan", "nan", "3"]
    assert said[2] == "0 leaves are the same, 1 are not"
    assert ask(capsys, "checkpoints", "diff", run, 1, 1) == (
        0,
        {"a": 1, "b": 1, "leaves": [], "same": 1, "metadata": []},
    )
    code, found = ask(capsys, "checkpoints", "diff", run, 1, 9)
    assert code == 2 and found["error"].endswith("the steps on disk are 1, 2, 3")


def test_rollback(run, capsys):
    code, found = ask(capsys, "checkpoints", "rollback", run, "--before", 3)
    assert (code, found["target"]) == (0, 1)
    _, found = ask(capsys, "checkpoints", "ls", run)
    tags = {row["step"]: row["tag"] for row in found["steps"]}
    assert tags == {1: "healthy", 2: "quarantined", 3: "quarantined"}
    code, found = ask(capsys, "checkpoints", "rollback", run, "--before", 1)
    assert code == 1 and found["error"].startswith("needed a healthy step before 1 in ")


def test_a_folder_that_is_no_run(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    code, found = ask(capsys, "checkpoints", "ls", tmp_path)
    assert code == 2
    assert found["error"] == (
        "needed a folder that a stabil Keeper made, got one that holds 'mine.txt' at "
        f"{tmp_path}: nothing was changed; name a new or empty folder"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "words",
    [[], ["checkpoints"], ["checkpoints", "ls"], ["no_such_command"], ["demo", "--x"]],
)
def test_words_that_make_no_command(words, capsys):
    assert main(words) == 2
    assert "usage: stabil" in capsys.readouterr().err


def test_help(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "demo" in said and "checkpoints" in said


def test_a_remote_level_is_listed_and_verified_but_not_changed(tmp_path, capsys):
    url, far = f"file://{tmp_path}/far", tmp_path / "far"
    with checkpoints.Keeper(tmp_path / "run", save_every=1, remote=url) as keeper:
        for step in (1, 2):
            keeper.save(step, {"w": jnp.full([3], step)}, force=True)
            keeper.wait()
            keeper.mark(step, "healthy", "calm")
    before = {p: p.read_bytes() for p in far.rglob("*") if p.is_file()}
    code, found = ask(capsys, "checkpoints", "ls", url)
    rows = [(x["step"], x["tag"], x["cause"]) for x in found["steps"]]
    assert (code, rows) == (0, [(1, "healthy", "calm"), (2, "healthy", "calm")])
    assert all(x["size"] > 1000 and x["saved"] for x in found["steps"])
    code, found = ask(capsys, "checkpoints", "verify", url)
    assert (code, [x["step"] for x in found["steps"]]) == (0, [2, 1])
    assert {p: p.read_bytes() for p in far.rglob("*") if p.is_file()} == before
    (place,) = far.glob("2-*")
    (data,) = [p for p in place.rglob("d/*") if p.stat().st_size < 1000][:1]
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    code, found = ask(capsys, "checkpoints", "verify", url, "--step", 2)
    (row,) = found["steps"]
    assert (code, row["ok"], row["tag"]) == (1, False, "healthy")
    assert row["problem"].startswith(f"{url}/{place.name}")
    code, found = ask(capsys, "checkpoints", "verify", url, "--step", 7)
    assert code == 2 and found["error"].endswith("the steps there are 1, 2")


def test_what_a_remote_level_does_not_take_is_said(tmp_path, capsys):
    url = f"file://{tmp_path}/far"
    code, found = ask(capsys, "checkpoints", "rollback", url, "--before", 3)
    assert code == 2 and found["error"].startswith(
        f"needed a folder on this machine for rollback, got {url}: name the folder of "
    )
    code, found = ask(capsys, "checkpoints", "ls", url)
    assert code == 2 and f"got none at {url}" in found["error"]
    assert not (tmp_path / "far").exists()
