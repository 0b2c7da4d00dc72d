"""Each ready sink gives its tracker the step, the names and the numbers.

The tests with the trackers themselves run where these are installed.
"""

import http.server
import json
import math
import re
import sys
import threading
import urllib.request

import pytest

from stabil.telemetry import (
    Apprise,
    Event,
    EventLog,
    MLflow,
    Prometheus,
    PrometheusPort,
    ScalarLog,
    SinkChannel,
    TensorBoard,
    WeightsAndBiases,
    read_events,
    to_parquet,
)

SCALARS = {"loss": 2.5, "grads/global_norm": 0.5}


class Recorder:
    """Answers every call and remembers it."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def record(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self.answer

        return record

    answer = True


def test_scalar_log_appends_one_object_a_step(tmp_path):
    path = tmp_path / "a" / "scalars.jsonl"
    for step in (1, 2):
        sink = ScalarLog(path)
        sink.write_scalars(step, {"loss": math.nan, "n": 3})
        sink.flush()
        sink.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [
        {"step": 1, "loss": None, "n": 3},
        {"step": 2, "loss": None, "n": 3},
    ]


def test_tensorboard_gets_one_scalar_a_name():
    writer = Recorder()
    TensorBoard(writer).write_scalars(7, SCALARS)
    assert [args for _, args, _ in writer.calls] == [
        ("loss", 2.5, 7),
        ("grads/global_norm", 0.5, 7),
    ]


def test_tensorboard_files_hold_the_numbers(tmp_path):
    tensorboardX = pytest.importorskip("tensorboardX")
    with tensorboardX.SummaryWriter(str(tmp_path)) as writer:
        sink = TensorBoard(writer)
        sink.write_scalars(7, SCALARS)
        sink.flush()
    (file,) = tmp_path.glob("events*")
    assert b"grads/global_norm" in file.read_bytes()


def test_wandb_keeps_rows_whose_step_goes_back():
    run = Recorder()
    sink = WeightsAndBiases(run)
    for step in (7, 8, 3):
        sink.write_scalars(step, {"loss": 1.0})
    assert run.calls == [
        ("define_metric", ("step",), {}),
        ("define_metric", ("*",), {"step_metric": "step"}),
        ("log", ({"step": 7, "loss": 1.0},), {}),
        ("log", ({"step": 8, "loss": 1.0},), {}),
        ("log", ({"step": 3, "loss": 1.0},), {}),
    ]


def test_wandb_itself_takes_the_calls(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="p") as run:
        sink = WeightsAndBiases(run)
        sink.write_scalars(7, SCALARS)
        sink.write_scalars(3, SCALARS)
        assert run.summary["step"] == 3


def test_mlflow_itself_holds_the_numbers(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "runs").as_uri())
    experiment = client.create_experiment("e")
    run_id = client.create_run(experiment).info.run_id
    MLflow(client, run_id).write_scalars(7, SCALARS)
    (metric,) = client.get_metric_history(run_id, "grads/global_norm")
    assert (metric.value, metric.step) == (0.5, 7)


def test_mlflow_gets_batches_of_its_entities(monkeypatch):
    entities = pytest.importorskip("mlflow.entities")
    client = Recorder()
    many = {f"m{i}": float(i) for i in range(1500)}
    MLflow(client, "r").write_scalars(7, many)
    sizes = [len(kwargs["metrics"]) for _, _, kwargs in client.calls]
    first = client.calls[0][2]["metrics"][1]
    assert sizes == [1000, 500] and isinstance(first, entities.Metric)
    assert (first.key, first.value, first.step) == ("m1", 1.0, 7)


def test_prometheus_file_is_whole_and_in_the_format(tmp_path):
    path = tmp_path / "stabil.prom"
    sink = Prometheus(path, every_seconds=3600, labels={"run": 'a"7'})
    sink.write_scalars(1, SCALARS)
    sink.write_scalars(2, {"loss": math.nan, "x": math.inf, "y": -math.inf, "z": 1e-9})
    assert "stabil_step" in path.read_text() and "NaN" not in path.read_text()
    sink.flush()
    lines = path.read_text().splitlines()
    assert lines == [
        "# TYPE stabil_step gauge",
        r'stabil_step{run="a\"7"} 2',
        "# TYPE stabil_loss gauge",
        r'stabil_loss{run="a\"7"} NaN',
        "# TYPE stabil_x gauge",
        r'stabil_x{run="a\"7"} +Inf',
        "# TYPE stabil_y gauge",
        r'stabil_y{run="a\"7"} -Inf',
        "# TYPE stabil_z gauge",
        r'stabil_z{run="a\"7"} 1e-09',
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["stabil.prom"]


def test_a_prometheus_port_answers_with_the_newest_numbers():
    parser = pytest.importorskip("prometheus_client.parser")
    sink = PrometheusPort(0, labels={"run": "a7"})
    url = f"http://localhost:{sink.port}/metrics"
    try:
        for step in (1, 2):
            sink.write_scalars(step, {"grads/global_norm": 0.5 * step, "x": math.inf})
        with urllib.request.urlopen(url, timeout=10) as page:
            families = parser.text_string_to_metric_families(page.read().decode())
            samples = [s for family in families for s in family.samples]
    finally:
        sink.close()
    assert [(s.name, s.labels, s.value) for s in samples] == [
        ("stabil_step", {"run": "a7"}, 2.0),
        ("stabil_grads_global_norm", {"run": "a7"}, 1.0),
        ("stabil_x", {"run": "a7"}, math.inf),
    ]
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=1)


def test_a_clu_writer_is_a_sink_as_it_is(tmp_path):
    metric_writers = pytest.importorskip("clu.metric_writers")
    channel = SinkChannel(metric_writers.SummaryWriter(str(tmp_path)))
    channel.put(7, lambda: SCALARS)
    channel.close(timeout_seconds=30)
    assert channel.lost == 0
    (file,) = tmp_path.glob("events*")
    assert b"grads/global_norm" in file.read_bytes()


def test_apprise_gets_severity_and_its_failure_is_an_error():
    notifier = Recorder()
    for severity in ("info", "warning", "critical"):
        Apprise(notifier).send("t", "b", severity)
    kinds = [kwargs["notify_type"] for _, _, kwargs in notifier.calls]
    assert kinds == ["info", "warning", "failure"]
    notifier.answer = False
    text = "apprise could not deliver to every channel"
    with pytest.raises(ConnectionError, match=f"^{text}$"):
        Apprise(notifier).send("t", "b", "info")


def test_apprise_itself_delivers_to_a_webhook():
    apprise = pytest.importorskip("apprise")
    bodies = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            size = int(self.headers["Content-Length"])
            bodies.append(json.loads(self.rfile.read(size)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("localhost", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        notifier = apprise.Apprise()
        notifier.add(f"json://localhost:{server.server_port}")
        Apprise(notifier).send("stabil: stop", "why.", "critical")
        server.shutdown()
    assert [(b["title"], b["message"], b["type"]) for b in bodies] == [
        ("stabil: stop", "why.", "failure")
    ]


def write_log(path):
    with EventLog(path, run="r") as log:
        for step, loss in enumerate((1.5, math.nan, math.inf)):
            numbers = {"loss": loss, "steps": 3}
            log.add(
                Event(action="skip", step=step, cause="loss_spike", numbers=numbers)
            )
        log.add(Event(action="end", step=3))


def test_parquet_holds_every_event(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_log(tmp_path / "events.jsonl")
    target = tmp_path / "events.parquet"
    assert to_parquet(tmp_path, target) == 4
    rows = parquet.read_table(target).to_pylist()
    assert [r["step"] for r in rows] == [0, 1, 2, 3]
    assert [r["run"] for r in rows] == ["r"] * 4 and rows[0]["micro_batch"] is None
    assert rows[0]["loss"] == 1.5 and math.isnan(rows[1]["loss"])
    assert rows[3]["loss"] is None and json.loads(rows[0]["numbers"])["steps"] == 3


def test_without_pyarrow_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    text = (
        "to_parquet: needed pyarrow, got none; write pip install pyarrow, or read the "
        "JSON lines as they are with pandas.read_json(path, lines=True)"
    )
    with pytest.raises(ImportError, match=f"^{re.escape(text)}$"):
        to_parquet(tmp_path, tmp_path / "x.parquet")


def test_pandas_and_duckdb_read_the_log_in_one_line(tmp_path):
    pandas, duckdb = pytest.importorskip("pandas"), pytest.importorskip("duckdb")
    path = tmp_path / "events.jsonl"
    write_log(path)
    table = pandas.read_json(path, lines=True)
    assert table.groupby("action").size().to_dict() == {"end": 1, "skip": 3}
    found = duckdb.sql(
        f"SELECT action, count(*) FROM read_json_auto('{path}') GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert found == [("end", 1), ("skip", 3)]


def test_a_long_log_goes_on_in_a_new_file(tmp_path):
    with EventLog(tmp_path / "events.jsonl", max_bytes=20_000) as log:
        for step in range(500):
            log.add(Event(action="log", step=step, time=float(step + 1)))
            if step % 50 == 49:
                log.flush()
    files = sorted(p.name for p in tmp_path.iterdir())
    assert len(files) > 3 and files[0] == "events.0001.jsonl"
    assert all(p.stat().st_size < 60_000 for p in tmp_path.iterdir())
    assert [e.step for e in read_events(tmp_path)] == list(range(500))
