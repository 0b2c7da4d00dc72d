"""Templates of repeated messages, and which log alone holds one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stabil.curves import Log, Messages, lint, only_in_one

TEXT = """\
loading shard 7 of 12 from /data/a
step 1 loss 3.5 grad_norm 1.0
WARN NCCL ring 3 slow on node-14: 31 ms
step 2 loss 3.4 grad_norm 1.1
WARN NCCL ring 8 slow on node-02: 45 ms
loading shard 8 of 12 from /data/b
step 3 loss 3.3 grad_norm 1.0
WARN NCCL ring 1 slow on node-77: 39 ms
"""


def test_changing_words_are_left_out_and_lines_are_numbered(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(TEXT)
    report = lint(path)
    assert report.rows == 3
    (warning,) = report.repeated
    assert warning.template == "WARN NCCL ring <*> slow on <*> <*> ms"
    assert (warning.lines, warning.first, warning.last) == (3, 3, 8)
    assert [m["lines"] for m in report.as_dict()["messages"]] == [3, 2]
    assert not report.findings


def test_words_that_differ_without_a_digit_are_found_too():
    messages = Messages()
    for i, name in enumerate(("alpha", "beta", "gamma")):
        messages.add(i + 1, f"worker {name} joined the run late")
    (one,) = messages.repeated()
    assert one.template == "worker <*> joined the run late" and not one.ill


def test_unlike_lines_stay_apart():
    messages = Messages()
    messages.add(1, "worker joined the run late")
    messages.add(2, "worker lost its only data")
    messages.add(3, "checkpoint saved")
    assert messages.repeated() == [] and len(messages.repeated(1)) == 3


@given(st.lists(st.text(alphabet="ab 1", max_size=30), max_size=60))
@settings(max_examples=60, deadline=None)
def test_every_line_with_words_is_counted_once(lines):
    messages = Messages()
    for i, line in enumerate(lines, 1):
        messages.add(i, line)
    counted = sum(m.lines for m in messages.repeated(1)) + messages.lost
    assert counted == sum(bool(line.split()) for line in lines)


def test_memory_does_not_grow():
    messages = Messages()
    for i in range(5000):
        word = "".join(chr(97 + i // 26**k % 26) for k in range(3))
        messages.add(i, f"{word} {word[::-1]} is unlike {word}")
    kept = messages.repeated(1)
    assert len(kept) == 2000 and messages.lost == 3000


def test_trouble_of_one_log_alone_is_named():
    logs = []
    for rank in range(4):
        messages = Messages()
        for i in range(5):
            messages.add(i, f"step took {i} ms")
            if rank == 2:
                messages.add(i, f"ECC error on device {i}")
        messages.add(9, "WARN slow disk")
        messages.add(10, "WARN slow disk")
        logs.append(messages.repeated(1))
    ((rank, message),) = only_in_one(logs)
    assert (rank, message.template) == (2, "ECC error on device <*>")
    assert only_in_one(logs[1:3]) == []


def test_messages_start_again_with_each_reading(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(TEXT)
    log = Log(path)
    assert [len(list(log)) for _ in range(2)] == [3, 3]
    assert log.messages.repeated()[0].lines == 3
