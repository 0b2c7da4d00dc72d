"""Faults outside the arrays: checkpoint bytes, process, disk, alerts."""

import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from stabil.checkpoints import Keeper, SaveFailedError
from stabil.telemetry import AlertDesk, Event, EventLog
from stabil.testing import inject

STATE = {"w": jnp.arange(512.0)}
TARGET = jax.eval_shape(lambda: STATE)


def fault(place, kind, **fields):
    return inject.Fault(**{"kind": kind, "place": place, "step": 3} | fields)


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def files(tmp_path):
    for name in ("a/x", "a/y", "b/x"):
        path = tmp_path / "step" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(range(200)))
    (tmp_path / "step" / "empty").touch()
    return tmp_path / "step"


@pytest.mark.parametrize("kind", inject.HOST_KINDS["checkpoint"])
def test_a_checkpoint_fault_changes_one_file(files, kind):
    before = contents(files)
    (struck,) = inject.checkpoint((fault("checkpoint", kind, where="x"),), 3, files)
    after = contents(files)
    assert struck.name == "x"
    assert [p for p in before if before[p] != after.get(p)] == [struck]
    if kind == "bit_flip":
        pairs = zip(before[struck], after[struck], strict=True)
        assert sum((a ^ b).bit_count() for a, b in pairs) == 1
    if kind == "truncate":
        assert after[struck] == before[struck][:100]


def test_checkpoint_faults_are_drawn_by_seed(files):
    def struck(seed):
        flip = fault("checkpoint", "bit_flip", seed=seed, entries=9)
        clean = contents(files)
        inject.checkpoint((flip,), 3, files)
        changed = {p: d for p, d in contents(files).items() if d != clean[p]}
        for path, data in clean.items():
            path.write_bytes(data)
        return changed

    assert struck(1) == struck(1)
    assert len({tuple(struck(seed)) for seed in range(9)}) > 1
    before = contents(files)
    assert inject.checkpoint((fault("checkpoint", "remove"),), 4, files) == ()
    assert contents(files) == before


def test_a_keeper_finds_the_damage(tmp_path):
    with Keeper(tmp_path / "ck") as keeper:
        for step in (1, 2):
            keeper.save(step, STATE, force=True)
            keeper.wait()
            keeper.mark(step, "healthy")
        struck, state = keeper.directory / "2", keeper.directory / "2" / "state"
        # Every file, since which of them holds what has no fixed name.
        names = sorted(str(p.relative_to(struck)) for p in state.rglob("*"))
        names = [n for n in names if (struck / n).is_file()]
        flips = tuple(
            fault("checkpoint", "bit_flip", where=n, entries=64) for n in names
        )
        paths = inject.checkpoint(flips, 3, struck)
        assert paths and all(path.is_relative_to(state) for path in paths)
        assert keeper.restore(TARGET).step == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(kind="remove", where="c"),
            "needed a file below {} whose path holds 'c' and that is not empty, got "
            "none; the files are a/x, a/y, b/x, empty",
        ),
        (
            dict(kind="truncate", size=1.0),
            "needed 0 <= size < 1, the share of the file that truncate leaves, got 1.0",
        ),
    ],
)
def test_what_a_checkpoint_refuses(files, fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message.format(files))}$"):
        inject.checkpoint((fault("checkpoint", **fields),), 3, files)


@pytest.mark.parametrize("place", inject.HOST_KINDS)
def test_kinds_belong_to_places(place):
    kinds = ", ".join(inject.HOST_KINDS[place])
    message = f"needed kind of {place} to be one of {kinds}, got 'nan'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fault(place, "nan")


CODE = """
import sys
from stabil.testing import inject
for step in range(6):
    print(step, flush=True)
    kill = inject.Fault(kind=sys.argv[1], place="process", step=3, size=None)
    inject.process((kill,), step, once=sys.argv[2])
"""


def test_a_killed_process_is_spared_the_next_time(tmp_path):
    command = [sys.executable, "-c", CODE, "die", str(tmp_path / "struck")]
    first, second = (subprocess.run(command, capture_output=True) for _ in range(2))
    assert (first.returncode, first.stdout.split()[-1]) == (-9, b"3")
    assert (second.returncode, second.stdout.split()[-1]) == (0, b"5")
    assert (tmp_path / "struck").read_text() == "die in process at step 3\n"


def test_a_hung_process_sleeps():
    begun = time.monotonic()
    nap = fault("process", "hang", size=0.2)
    inject.process((nap,), 2)
    inject.process((nap,), 3)
    assert time.monotonic() - begun >= 0.2


@pytest.mark.parametrize("kind", inject.HOST_KINDS["disk"])
def test_a_disk_fails_saves_and_recovers(tmp_path, kind):
    away = fault("disk", kind, duration=2)
    with Keeper(tmp_path / "ck", save_every=1) as keeper:
        with inject.Disk((away,), tmp_path / "ck") as disk:
            for step in range(7):
                disk.at(step)
                try:
                    keeper.save(step, STATE)
                    keeper.wait()
                except SaveFailedError:
                    assert step in (3, 4)
        assert set(keeper.steps()) == {0, 1, 2, 5, 6}


def test_a_full_disk_fails_python_too_and_is_given_back(tmp_path):
    with pytest.raises(ZeroDivisionError):
        with inject.Disk((fault("disk", "full", size=4),), tmp_path) as disk:
            disk.at(3)
            with pytest.raises(OSError, match="File too large"):
                with open(tmp_path / "f", "wb", buffering=0) as file:
                    assert file.write(b"12345") == 4
                    file.write(b"5")
            _ = 1 / 0
    (tmp_path / "f").write_bytes(bytes(100))


def test_a_full_disk_costs_a_log_its_rows_and_no_more(tmp_path):
    with EventLog(tmp_path / "events.jsonl", every_seconds=0.01) as log:
        with inject.Disk((fault("disk", "full"),), tmp_path) as disk:
            disk.at(3)
            log.add(Event(action="skip", step=3))
            assert not log.flush()
        log.add(Event(action="skip", step=4))
    rows = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(rows) == 2 and '"step": 4' in rows[0].replace('":4', '": 4')
    assert log.failed_rows == 1


@pytest.mark.parametrize("kind", inject.HOST_KINDS["alerts"])
def test_a_dead_channel_loses_its_messages_alone(kind):
    class Inbox:
        def __init__(self):
            self.texts = []

        def send(self, title, text, severity):
            self.texts.append(text)

    whole, part = Inbox(), Inbox()
    channel = inject.AlertChannel((fault("alerts", kind, size=0.01),), part)
    desk = AlertDesk([whole, channel], cool_down_minutes=0)
    for step in (2, 3, 4):
        channel.at(step)
        desk.notify(Event(action="skip", step=step, cause="loss_spike"))
        for background in desk._channels:
            assert background.flush()
    desk.close()
    assert len(whole.texts) == 3 and len(part.texts) == 2
    assert (channel.sent, channel.refused, desk.lost) == (2, 1, 1)


def test_a_hung_channel_is_let_go_at_the_end():
    channel = inject.AlertChannel((fault("alerts", "hang"),))
    channel.at(3)
    channel.close()
    with pytest.raises(ConnectionError, match="^hang in alerts at step 3$"):
        channel.send("", "", "info")
