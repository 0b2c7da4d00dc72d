"""Events as a Parquet file, for tools that do not read JSON lines."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from typing import Any

from stabil.telemetry._event import Event
from stabil.telemetry._log import read_events

# Figures that most events have, as columns of their own.
FIGURES = ("loss", "grad_norm", "clip_factor", "score")


def to_parquet(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> int:
    """Writes the events of a log file or run folder to a Parquet file.

    One row an event, one column a field of `Event`, and `loss`, `grad_norm`,
    `clip_factor` and `score` beside `numbers`, which is JSON. Needs `pyarrow`. The log
    itself is readable as it is: `pandas.read_json(path, lines=True)`, or in DuckDB
    `SELECT * FROM read_json_auto('events.jsonl')`.

    Args:
      path: log file or run folder.
      target: file to write; replaced when it is there.

    Returns:
      Number of rows.

    Raises:
      ImportError: pyarrow is missing.
      FileNotFoundError: no log at `path`.
    """
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(
            "to_parquet: needed pyarrow, got none; write pip install pyarrow, or read "
            "the JSON lines as they are with pandas.read_json(path, lines=True)"
        ) from error
    events = read_events(path)
    types = {
        str: pyarrow.string(),
        int: pyarrow.int64(),
        float: pyarrow.float64(),
    }
    fields = [(f.name, types[_kind(f)]) for f in dataclasses.fields(Event)]
    fields += [(name, pyarrow.float64()) for name in FIGURES]
    table = pyarrow.Table.from_pylist(
        [_row(event) for event in events], schema=pyarrow.schema(fields)
    )
    parquet.write_table(table, os.fspath(target))
    return len(events)


def _kind(field: dataclasses.Field[Any]) -> type:
    name = str(field.type).split(" ")[0]
    return {"int": int, "float": float}.get(name, str)


def _row(event: Event) -> dict[str, Any]:
    row = {f.name: getattr(event, f.name) for f in dataclasses.fields(Event)}
    for name in FIGURES:
        value = event.numbers.get(name)
        row[name] = float(value) if isinstance(value, (int, float)) else None
    row["numbers"] = json.dumps(json.loads(event.to_json())["numbers"])
    return row
