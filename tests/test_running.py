"""What `docs/running.md` says about running holds, as far as it can be run here."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest

from stabil import telemetry
from stabil.policy import Ladder, Observation
from stabil.session import ExitCode
from stabil.session._ending import _COMPARE_EVERY
from stabil.telemetry import Beat, Event, EventLog, Heartbeat
from stabil.telemetry._heartbeat import STATES

DOC = pathlib.Path(__file__).parent.parent / "docs" / "running.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", DOC.read_text(), re.DOTALL)


def functions():
    """What the Python blocks define, apart from the script that trains."""
    names = {}
    script, *others = blocks("python")
    compile(script, "docs/running.md", "exec")
    for block in others:
        exec(compile(block, "docs/running.md", "exec"), names)
    return names


def test_the_policy_of_the_page_can_be_made():
    (told,) = [p for p in functions().values() if isinstance(p, Ladder)]
    kinds = {a.kind for a in told.decide(Observation(3, 3, ("loss_spike",), "wte"))}
    assert kinds == {"skip", "look"}


@pytest.mark.parametrize("name", re.findall(r"`telemetry\.(\w+)", DOC.read_text()))
def test_the_sinks_that_it_names_exist(name):
    assert name in telemetry.__all__


def test_the_table_of_codes_is_that_of_the_package():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", DOC.read_text(), re.MULTILINE)
    assert {name: int(code) for code, name in rows} == {
        c.name: int(c) for c in ExitCode
    }
    start_again = functions()["start_again"]
    assert [c for c in (0, 1, 75, 76, 77, 139) if start_again(c)] == [1, 75, 139]


def test_the_heartbeat_has_the_fields_and_states_that_it_names():
    text = DOC.read_text()
    fields = set(re.findall(r"`(\w+)`", text.split("| field |")[1].split("\n\n")[0]))
    assert fields == {*STATES, *Beat.__dataclass_fields__}
    assert f"every {_COMPARE_EVERY}th step" in text


def test_a_silent_process_is_hung_and_one_that_ended_is_not(tmp_path):
    is_hung = functions()["is_hung"]
    assert not is_hung(tmp_path)
    for state, ages in (("running", [700]), ("paused", [4000]), ("ended", [])):
        for age in (10, 700, 4000):
            with Heartbeat(tmp_path / "heartbeat.json") as heart:
                heart.beat(7, state)
            path = tmp_path / "heartbeat.json"
            beat = json.loads(path.read_text())
            path.write_text(json.dumps(beat | {"time": beat["time"] - age}))
            assert is_hung(tmp_path) == (bool(ages) and age >= min(ages))


def test_the_last_action_is_the_last_row(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        log.add(Event(action="start"))
        log.add(Event(action="preempted"))
    assert functions()["last_action"](tmp_path) == "preempted"


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_the_shell_finds_an_old_heartbeat_and_scripts_parse(tmp_path):
    find, job = blocks("bash")
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    beat = folder / "heartbeat.json"
    beat.write_text("{}")

    def shell():
        done = subprocess.run(
            ["bash", "-c", find], cwd=tmp_path, capture_output=True, text=True
        )
        return done.stdout

    assert shell() == ""
    subprocess.run(["touch", "-d", "11 minutes ago", beat], check=True)
    assert shell() == "hung\n"
    subprocess.run(["bash", "-n", "-c", job], check=True)


def test_the_manifest_is_yaml_with_the_codes_that_need_a_person():
    yaml = pytest.importorskip("yaml")
    (text,) = blocks("yaml")
    spec = yaml.safe_load(text)["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [76, 77]
    (container,) = job["template"]["spec"]["containers"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
