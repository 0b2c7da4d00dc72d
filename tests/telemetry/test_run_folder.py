"""A run's folder is claimed once and never taken over."""

import re

import pytest

from stabil.telemetry import RunFolder


def test_a_new_folder_is_claimed_and_known_again(tmp_path):
    first = RunFolder(tmp_path / "a" / "run")
    second = RunFolder(tmp_path / "a" / "run")
    assert first.is_new and not second.is_new
    assert first.run == second.run
    assert re.fullmatch(r"run-[0-9a-f]{6}", first.run)


def test_foreign_files_are_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "data").mkdir()
    text = (
        "needed a new or empty folder or one made by stabil as run_dir, got "
        f"{tmp_path} with 2 other entries (first: data); choose another run_dir, "
        "nothing was changed"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        RunFolder(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "thesis.tex"]


def test_the_keepers_own_folder_may_be_there_already(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert RunFolder(tmp_path, ignore=[tmp_path / "checkpoints"]).is_new


def test_a_file_and_a_remote_path_are_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    text = (
        f"needed a folder as run_dir, got the file {path}; choose another run_dir, "
        "nothing was changed"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        RunFolder(path)
    text = (
        "needed a local folder as run_dir, got gs://bucket/run; write logs to a local "
        "disk, and hand the remote path to stabil.checkpoints.Keeper"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        RunFolder("gs://bucket/run")


def test_notes_are_replaced_whole(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert folder.read("notes.json") is None
    folder.write("notes.json", {"a": 1})
    folder.write("notes.json", {"a": 2})
    assert folder.read("notes.json") == {"a": 2}
    assert not list(folder.path.glob("*.tmp"))
