"""Two ways to Prometheus: a text file that is collected, and a port that is asked."""

from __future__ import annotations

import http.server
import json
import math
import os
import pathlib
import re
import threading
import time
from collections.abc import Mapping


class Prometheus:
    """Keeps a text file for the textfile collector of Prometheus's node exporter.

    A file and no port: it needs no permission and survives the process. Replaced in one
    step, at most every `every_seconds` and when the run ends.

    Args:
      path: file; its name must end in `.prom` for the collector.
      every_seconds: shortest time between two writes.
      labels: labels of every metric, for example `{"run": "a7"}`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every_seconds: float = 5.0,
        labels: Mapping[str, str] | None = None,
    ):
        self._path = pathlib.Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._every, self._at = every_seconds, -math.inf
        self._labels = _labels(labels)
        self._text = ""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._text = _exposition(step, scalars, self._labels)
        if time.monotonic() - self._at >= self._every:
            self.flush()

    def flush(self) -> None:
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        temporary.write_text(self._text)
        os.replace(temporary, self._path)
        self._at = time.monotonic()


class PrometheusPort:
    """Answers Prometheus's own requests with the newest numbers, from a thread.

    Args:
      port: 0 takes a free one.
      host: address to listen at; this machine alone by default.
      labels: labels of every metric.

    Attributes:
      port: the port that is listened at.

    Raises:
      OSError: the port is taken.

    Examples:
      >>> import urllib.request
      >>> sink = PrometheusPort(0)
      >>> sink.write_scalars(3, {"loss": 2.5})
      >>> page = urllib.request.urlopen(f"http://localhost:{sink.port}/metrics")
      >>> print(page.read().decode().splitlines()[-1])
      stabil_loss 2.5
      >>> sink.close()
    """

    def __init__(
        self,
        port: int = 9108,
        *,
        host: str = "localhost",
        labels: Mapping[str, str] | None = None,
    ):
        self._labels, self._text = _labels(labels), ""
        sink = self

        class Page(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = sink._text.encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass  # a line a request would bury the training's own

        self._server = http.server.ThreadingHTTPServer((host, port), Page)
        self.port = self._server.server_port
        threading.Thread(
            target=self._server.serve_forever, name="stabil-prometheus", daemon=True
        ).start()

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._text = _exposition(step, scalars, self._labels)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _exposition(step: int, scalars: Mapping[str, float], labels: str) -> str:
    lines = []
    for name, value in {"step": step, **scalars}.items():
        name = f"stabil_{_name(name)}"
        lines.append(f"# TYPE {name} gauge\n{name}{labels} {_number(value)}\n")
    return "".join(lines)


def _labels(labels: Mapping[str, str] | None) -> str:
    # JSON's quoting of text is that of the exposition format.
    pairs = [
        f"{_name(k)}={json.dumps(v, ensure_ascii=False)}"
        for k, v in (labels or {}).items()
    ]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _name(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", text)


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
