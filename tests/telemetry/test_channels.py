"""Sinks, alerts and the progress line: seldom, sound, and harmless when dead."""

import io
import re
import threading
import time

import pytest

from stabil.telemetry import AlertDesk, Event, ProgressLine, SinkChannel, sentence


class Inbox:
    def __init__(self):
        self.messages = []

    def send(self, title, text, severity):
        self.messages.append((title, text, severity))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def skip(step, cause="loss_spike"):
    return Event(action="skip", step=step, cause=cause, layer="loss", data_index=step)


def test_one_message_an_hour_per_cause_and_the_next_counts_the_rest():
    inbox, clock = Inbox(), Clock()
    desk = AlertDesk([inbox], run="r", clock=clock)
    sent = []
    for step in range(100):
        sent.append(desk.notify(skip(step)))
        clock.now += 60.0
    desk.close()
    assert [i for i, s in enumerate(sent) if s] == [0, 60]
    assert inbox.messages == [
        ("stabil r: skip", "loss spike in loss at step 0, batch 0: skip.", "warning"),
        (
            "stabil r: skip",
            "loss spike in loss at step 60, batch 60: skip. 59 more since the last "
            "message, steps 1 to 59.",
            "warning",
        ),
    ]
    assert desk.held_back == 98


def test_a_summary_tells_what_was_held_back():
    inbox = Inbox()
    desk = AlertDesk([inbox], run="r", clock=Clock())
    for step in range(4):
        desk.notify(skip(step))
    desk.summarize()
    desk.close()
    assert [m[1] for m in inbox.messages][1] == (
        "loss spike in loss at step 3, batch 3: skip. 2 more since the last message, "
        "steps 1 to 2."
    )


def test_other_causes_and_worse_events_are_not_held_back():
    inbox = Inbox()
    desk = AlertDesk([inbox], clock=Clock())
    for event in (
        skip(1),
        skip(2, "nonfinite_loss"),
        Event(action="rollback", step=3, cause="loss_spike"),
        Event(action="rollback", step=4, cause="loss_spike"),
        skip(5),
        Event(action="stop", step=6, cause="loss_spike"),
        Event(action="stop", step=7, cause="loss_spike"),
        Event(action="clip", step=8),
    ):
        desk.notify(event)
    desk.close()
    assert [(t.split(": ")[1], s) for t, _, s in inbox.messages] == [
        ("skip", "warning"),
        ("skip", "warning"),
        ("rollback", "critical"),
        ("stop", "critical"),
        ("stop", "critical"),
    ]


def test_a_dead_channel_and_a_stuck_one_hurt_nobody():
    gate, inbox = threading.Event(), Inbox()

    class Dead:
        def send(self, title, text, severity):
            raise ConnectionError("no route")

    class Stuck:
        def send(self, title, text, severity):
            gate.wait(30)

    desk = AlertDesk([Dead(), Stuck(), inbox], cool_down_minutes=0)
    begun = time.perf_counter()
    for step in range(2000):
        desk.notify(skip(step))
    assert time.perf_counter() - begun < 1
    desk.close(timeout_seconds=0.5)
    assert len(inbox.messages) + sum(c.dropped for c in desk._channels[2:]) == 2000
    assert desk.lost >= 1000
    gate.set()


def test_the_sentence_names_cause_layer_step_batch_and_action():
    event = Event(
        action="rollback",
        step=9,
        cause="nonfinite_loss,nonfinite_gradient",
        layer="activations/block_3/mlp",
        batch_id="shard-7:12",
        text="3 blocked steps in a row",
    )
    assert sentence(event) == (
        "nonfinite loss and nonfinite gradient in activations/block_3/mlp at step 9, "
        "batch shard-7:12: rollback (3 blocked steps in a row)."
    )


def test_a_sink_gets_every_step_in_order_and_is_closed():
    calls = []

    class Sink:
        def write_scalars(self, step, scalars):
            calls.append((step, scalars))

        def flush(self):
            calls.append("flush")

        def close(self):
            calls.append("close")

    channel = SinkChannel(Sink())
    for step in range(50):
        channel.put(step, lambda step=step: {"loss": float(step)})
    channel.close()
    assert calls == [(i, {"loss": float(i)}) for i in range(50)] + ["flush", "close"]
    assert channel.lost == 0


def test_a_sink_that_fails_loses_only_those_rows():
    kept = []

    class Flaky:
        def write_scalars(self, step, scalars):
            if step % 3 == 0:
                raise OSError("quota")
            kept.append(step)

    channel = SinkChannel(Flaky())
    for step in range(30):
        channel.put(step, dict)
    channel.close()
    assert kept == [i for i in range(30) if i % 3] and channel.lost == 10
    assert str(channel.last_error) == "quota"


def test_errors_say_what_to_write():
    text = (
        "needed a sink with write_scalars(step, scalars), got 3; wrap your tracker in "
        "a class with that one method"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        SinkChannel(3)
    text = (
        "needed an alert with send(title, text, severity), got 3; wrap your channel in "
        "a class with that one method"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        AlertDesk([3])


class Terminal(io.StringIO):
    def isatty(self):
        return True


FIGURES = {"loss": 2.5, "grad_norm": 0.51234, "blocked": 1, "clipped": 4}


def test_progress_is_one_line_on_a_terminal_and_silent_elsewhere():
    screen, pipe = Terminal(), io.StringIO()
    for stream in (screen, pipe):
        line = ProgressLine(100, stream=stream)
        for step in range(10):
            line.update(step, FIGURES)
        line.close()
    assert pipe.getvalue() == ""
    assert screen.getvalue() == (
        "\rstep 1/100  loss 2.5  grad_norm 0.5123  blocked 1  clipped 4\n"
    )


def test_forced_progress_ends_its_lines_and_shows_the_rate():
    pipe = io.StringIO()
    line = ProgressLine(None, always=True, stream=pipe)
    line.update(0, FIGURES)
    time.sleep(0.01)
    line.update(9, FIGURES, force=True)
    line.close()
    first, second = pipe.getvalue().splitlines()
    assert first == "step 1  loss 2.5  grad_norm 0.5123  blocked 1  clipped 4"
    assert re.fullmatch(
        re.escape(first).replace("1", "10", 1) + r"  \S+ steps/s", second
    )


def test_progress_that_is_off_or_has_lost_its_terminal_is_silent():
    screen = Terminal()
    ProgressLine(10, on=False, stream=screen).update(0, FIGURES)
    assert screen.getvalue() == ""
    gone = Terminal()
    line = ProgressLine(10, stream=gone)
    gone.close()
    line.update(0, FIGURES)
    line.close()
