"""`stabil run` hands the command, the limits and the code through."""

import argparse
import json
import sys

import pytest

from stabil.cli import _run


def stabil_run(*words):
    parser = argparse.ArgumentParser()
    _run.add_command(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["run", *map(str, words)])
    return args.run(args)


@pytest.mark.parametrize("code", [0, 76, 77])
def test_the_code_of_the_process_is_the_code_of_the_command(tmp_path, capsys, code):
    script = f"import sys; sys.exit({code})"
    words = ("--json", tmp_path / "run", "--", sys.executable, "-c", script)
    assert stabil_run(*words) == code
    assert json.loads(capsys.readouterr().out) == {"code": code, "starts": 1}


def test_a_process_that_dies_at_once_ends_with_the_budget(tmp_path, capsys):
    script = "raise SystemExit(3)"
    words = ("--restarts", 0, tmp_path / "run", "--", sys.executable, "-c", script)
    assert stabil_run(*words) == 77
    assert capsys.readouterr().err == "ended with code 77 after 1 start\n"
