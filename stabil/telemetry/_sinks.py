"""Ready sinks: trackers that people use, each behind the same one method.

None of them is imported here: hand over the tracker's own object. A CLU `MetricWriter`
is a sink as it is.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any, TextIO


class ScalarLog:
    """Appends the numbers of every step to a JSON-lines file.

    Read it with `pandas.read_json(path, lines=True)` or, in DuckDB,
    `SELECT * FROM 'scalars.jsonl'`. A number that is not finite becomes null.

    Args:
      path: file; created with its folder when missing, never truncated.

    Examples:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "scalars.jsonl"
      >>> sink = ScalarLog(path)
      >>> sink.write_scalars(3, {"loss": 2.5, "grads/global_norm": math.inf})
      >>> sink.close()
      >>> print(path.read_text(), end="")
      {"step": 3, "loss": 2.5, "grads/global_norm": null}
    """

    def __init__(self, path: str | os.PathLike[str]):
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = open(path, "a")

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        row = {k: v if math.isfinite(v) else None for k, v in scalars.items()}
        self._file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Writes to a TensorBoard `SummaryWriter`.

    Args:
      writer: for example `tensorboardX.SummaryWriter(folder)`, or any object with
        `add_scalar(tag, value, step)`.
    """

    def __init__(self, writer: Any):
        self._writer = writer

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()


class WeightsAndBiases:
    """Logs to a Weights & Biases run.

    The step is a metric of its own: after a rollback it goes back, and W&B drops rows
    whose built-in step does.

    Args:
      run: what `wandb.init()` returned.
    """

    def __init__(self, run: Any):
        self._run = run
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})


class MLflow:
    """Logs to an MLflow run, by a client: MLflow's active run belongs to one thread.

    Args:
      client: an `mlflow.MlflowClient`.
      run_id: for example `mlflow.active_run().info.run_id`.
    """

    def __init__(self, client: Any, run_id: str):
        self._client, self._run_id = client, run_id

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        Metric = importlib.import_module("mlflow.entities").Metric
        now = int(1000 * time.time())
        metrics = [Metric(k, float(v), now, step) for k, v in scalars.items()]
        for start in range(0, len(metrics), 1000):  # the server's limit
            self._client.log_batch(self._run_id, metrics=metrics[start : start + 1000])


class Apprise:
    """An alert channel through `apprise`: Slack, e-mail, webhooks and the rest.

    Args:
      notifier: an `apprise.Apprise` to which the channels were added.
    """

    def __init__(self, notifier: Any):
        self._notifier = notifier

    def send(self, title: str, text: str, severity: str) -> None:
        """Sends one message.

        Raises:
          ConnectionError: apprise could not deliver to every channel.
        """
        kinds = {"info": "info", "warning": "warning", "critical": "failure"}
        if not self._notifier.notify(
            title=title, body=text, notify_type=kinds[severity]
        ):
            raise ConnectionError("apprise could not deliver to every channel")
