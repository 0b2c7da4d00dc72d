"""Logs of every format: the same rows, and every bad line with its number."""

import base64
import gzip
import json
import math
import re
import zlib

import pytest

from stabil.curves import Log

ROWS = [(0, 3.0, 0.5), (10, 2.5, 0.4), (20, math.inf, math.nan), (30, 2.25, 0.3)]


def assert_rows(log, expected=ROWS):
    rows = list(log)
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        for a, b in zip(row, wanted, strict=True):
            assert a == b or (a != a and b != b)


def write(path, text):
    path.write_text(text)
    return path


def test_csv_with_a_head_in_any_order(tmp_path):
    text = "lr,loss,eval_loss,grad_norm,step\n"
    text += "1,3.0,9,0.5,0\n1,2.5,,0.4,10\n1,inf,,nan,20\n1,2.25,,0.3,30\n"
    log = Log(write(tmp_path / "a.csv", text))
    assert_rows(log)
    assert log.columns == {"step": "step", "loss": "loss", "grad_norm": "grad_norm"}
    packed = tmp_path / "a.csv.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert_rows(Log(packed))
    assert_rows(Log(write(tmp_path / "a.tsv", text.replace(",", "\t"))))


def test_jsonl_skips_evaluations_and_reads_nested_metrics(tmp_path):
    flat = [dict(step=s, loss=x, grad_norm=g) for s, x, g in ROWS]
    flat.insert(1, {"step": 5, "eval_loss": 1.0})
    text = "\n".join(json.dumps(r) for r in flat)
    assert_rows(Log(write(tmp_path / "a.jsonl", text)))
    nested = [{"step": r.pop("step"), "metrics": r} for r in flat]
    text = "\n".join(json.dumps(r) for r in nested)
    log = Log(write(tmp_path / "b.log", text))
    assert_rows(log)
    assert (log.format, log.columns["loss"]) == ("jsonl", "metrics/loss")


def test_hugging_face_trainer_state(tmp_path):
    history = [dict(step=s, loss=x, grad_norm=g, epoch=0.1) for s, x, g in ROWS]
    history.append({"step": 30, "eval_loss": 2.0, "epoch": 0.1})
    state = {"best_metric": None, "global_step": 30, "log_history": history}
    for text in (json.dumps(state, indent=2), json.dumps(state)):
        log = Log(write(tmp_path / "trainer_state.json", text))
        assert_rows(log)
        assert log.format == "json"


def test_lines_of_json_in_a_file_named_json(tmp_path):
    lines = [json.dumps(dict(step=s, loss=x, grad_norm=g)) for s, x, g in ROWS]
    log = Log(write(tmp_path / "run.json", "\r\n".join(lines)))
    assert_rows(log)
    assert log.format == "jsonl"


def test_weights_and_biases_export(tmp_path):
    names = ("train/loss", "train/loss__MIN", "train/loss__MAX")
    head = ",".join(f'"run-7 - {n}"' for n in names)
    text = f'"Step",{head}\n"0","3.0","1","9"\n"10","2.5","1","9"\n'
    log = Log(write(tmp_path / "wandb_export.csv", text))
    assert_rows(log, [(0, 3.0, None), (10, 2.5, None)])
    assert log.columns["loss"] == "run-7 - train/loss"


@pytest.mark.parametrize(
    "line",
    [
        "step {}/99 | loss {} (+1.2z)| norm {} (-0.1z)| lr 6.00e-04",
        " iteration {}/ 100 | elapsed: 3.1 | lm loss: {} | grad norm: {} | skipped: 0",
        "INFO step={} val_loss=7.0 train_loss={} grad_norm={}",
        "{{'step': {}, 'loss': {}, 'grad_norm': {}}}",
    ],
)
def test_plain_text(tmp_path, line):
    text = "starting\n" + "\n".join(line.format(*row) for row in ROWS) + "\ndone loss\n"
    text += "step 30 val loss 2.0\n"
    log = Log(write(tmp_path / "train.out", text))
    assert_rows(log)
    assert log.problem_count == 0


def test_text_by_pattern(tmp_path):
    text = "".join(f"[{s}] L<{x}> G<{g}>\n" for s, x, g in ROWS)
    path = write(tmp_path / "odd.log", text)
    groups = r"\[(?P<step>\d+)\] L<(?P<loss>.*?)> G<(?P<grad_norm>.*?)>"
    assert_rows(Log(path, pattern=groups))


# Written by tensorboardX 2.6: train/loss 2.0, 1.9, 1.8, nan, 1.6 and train/grad_norm
# 0.5 at steps 0, 10, 20, 30, 40, with eval/loss 9 at step 20.
TENSORBOARD = (
    "eNqTYICAxfXeSpwy+d3uyodvOUrxJhUlZubpuZal5pVYGb2bvKBPDqru5h0hI06WSog6LWEuQS6uEpBa"
    "/Zz84mJRoAKHdY+n+ytDVW+YX+7MabgEqlqCS4yLH6I6vSgxJT4vvygXpMWe63LEJAWoFs23KwM4D6+A"
    "aBHgwrDC2Piz/WR5bWdVqPpXe8w+cwqshKvHaYmAY3omiiW+ME0iGJakpT2zf21SFIZiSStCPU5Lzqd5"
    "LJaHagr0dpHg3IHQJMQlwMWZWpaYAwsrAcekadvFUdxUtRGqXA5L2B6on1awoQ3FTaab4OpxezynXR7F"
    "kkqYJg0MS86eOWP/TVZ3KYolKxHqcVrCvoHfFgDO36p/"
)


def test_tensorboard(tmp_path):
    data = zlib.decompress(base64.b64decode(TENSORBOARD))
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(data)
    losses = [2.0, 1.9, 1.8, math.nan, 1.6]
    rows = list(Log(path))
    assert [r[0] for r in rows] == [0, 10, 20, 30, 40]
    assert [r[1] for r in rows] == pytest.approx(losses, nan_ok=True)
    assert [r[2] for r in rows] == [0.5] * 5
    path.write_bytes(data[:-20])
    cut = Log(path)
    assert len(list(cut)) == 5
    assert cut.problems == [(12, "the record is cut off")]


def test_bad_lines_are_named_and_the_good_ones_used(tmp_path):
    good = [json.dumps(dict(step=s, loss=2.0)) for s in range(4)]
    lines = [good[0], '{"step": 1, "loss"', good[1], "[1, 2]", '{"loss": 2.0}', good[2]]
    lines += ['{"step": 9, "loss": "two"}', "", good[3]]
    log = Log(write(tmp_path / "a.jsonl", "\n".join(lines)))
    assert [row[0] for row in log] == [0, 1, 2, 3]
    assert [p.line for p in log.problems] == [2, 4, 5, 7]
    assert log.problems[0].text.startswith("no JSON: ")
    assert [p.text for p in log.problems[1:]] == [
        "JSON object needed, list found",
        "the step is missing",
        "could not convert string to float: 'two'",
    ]
    text = "step,loss\n0,2\n1\n2,2\n3,x\n"
    table = Log(write(tmp_path / "a.csv", text))
    assert [row[0] for row in table] == [0, 2]
    assert table.problems == [
        (3, "2 cells needed, 1 found"),
        (5, "could not convert string to float: 'x'"),
    ]


def test_many_problems_are_counted_and_few_kept(tmp_path):
    text = '{"step": 0, "loss": 1.0}\n' + "{\n" * 500
    log = Log(write(tmp_path / "a.jsonl", text))
    assert len(list(log)) == 1
    assert (log.problem_count, len(log.problems)) == (500, 20)


def test_rows_are_counted_where_there_is_no_step(tmp_path):
    log = Log(write(tmp_path / "a.csv", "train_loss\n3.0\n2.0\n"))
    assert_rows(log, [(0, 3.0, None), (1, 2.0, None)])


def test_what_cannot_be_read_is_explained(tmp_path):
    def check(text, call):
        with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
            call()

    path = write(tmp_path / "a.csv", "step,eval_loss\n0,1\n")
    check(
        f"{path}: needed a loss, got step, eval_loss (read as csv); name the loss, or "
        "for text give a pattern with a group named loss",
        lambda: iter(Log(path)),
    )
    check(
        f"{path}: needed loss named 'cost', got step, eval_loss; write one of these "
        "names",
        lambda: iter(Log(path, loss="cost")),
    )
    assert_rows(Log(path, loss="eval_loss"), [(0, 1.0, None)])
    check(
        "Log: needed a format of csv, tsv, json, jsonl, text, tensorboard, got 'xml'; "
        "leave it out to have it found out",
        lambda: Log(path, format="xml"),
    )
    check(
        "needed a pattern with a group named loss, got 'a'; write for example "
        r"'step (?P<step>\d+) loss (?P<loss>\S+) norm (?P<grad_norm>\S+)'",
        lambda: iter(Log(path, pattern="a")),
    )
    whole = write(tmp_path / "b.json", '{"a":\n 1}')
    check(
        f"{whole}: needed a JSON list of records, or an object with log_history as "
        "Hugging Face writes it; write one JSON object a line and name it .jsonl",
        lambda: iter(Log(whole)),
    )
    empty = write(tmp_path / "c.log", "")
    check(
        f"{empty}: needed a loss, got no records at all (read as text); name the loss, "
        "or for text give a pattern with a group named loss",
        lambda: iter(Log(empty)),
    )
