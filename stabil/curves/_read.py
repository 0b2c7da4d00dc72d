"""Rows of step, loss and gradient norm from a log in any of the usual formats."""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from stabil.curves import _records, _tensorboard
from stabil.curves._columns import choose, number
from stabil.curves._messages import Messages

_LOOK_AHEAD = 64  # records whose names are looked at before the columns are chosen
_KEPT = 20  # problems that are kept; all are counted
FORMATS = ("csv", "tsv", "json", "jsonl", "text", "tensorboard")


class Problem(NamedTuple):
    """A line of a log that could not be used; the good lines were.

    Attributes:
      line: number of the line, counted from 1; of the record in a JSON list or a
        TensorBoard file.
      text: what is wrong.
    """

    line: int
    text: str


class Log:
    """Rows (step, loss, gradient norm or None) of a log; iterate over it.

    The file is read as the rows are asked for, so memory does not grow with it, but for
    a JSON document, which is read whole.

    Args:
      path: the file; `.gz` is unpacked (not for TensorBoard).
      format: csv, tsv, json (a list of records, or Hugging Face's
        trainer_state.json), jsonl, text or tensorboard; found out if None.
      step: name of the step's column; found out if None, rows are counted if there
        is none.
      loss: name of the loss; found out if None.
      grad_norm: name of the gradient norm; found out if None.
      pattern: regular expression for text, with groups named loss and, where there
        are any, step and grad_norm.

    Attributes:
      columns: names that play the roles step, loss and grad_norm; after the first row.
      problems: the first 20 `Problem`s met so far.
      problem_count: all problems met so far.
      messages: `Messages`, the lines of a text that hold no numbers.

    Raises:
      ValueError: no loss was found, a named column is not there, the format is
        unknown, or a JSON document is malformed.
      OSError: the file cannot be read.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        *,
        format: str | None = None,
        step: str | None = None,
        loss: str | None = None,
        grad_norm: str | None = None,
        pattern: str | None = None,
    ):
        self.path = pathlib.Path(path)
        if format is not None and format not in FORMATS:
            raise ValueError(
                f"Log: needed a format of {', '.join(FORMATS)}, got {format!r}; leave "
                "it out to have it found out"
            )
        if format is None:
            format = "text" if pattern else _records.detect(self.path)
        self.format = format
        self.columns: dict[str, str | None] = {}
        self.problems: list[Problem] = []
        self.problem_count = 0
        self.messages = Messages()
        self._named = {"step": step, "loss": loss, "grad_norm": grad_norm}
        self._pattern = pattern

    def _complain(self, line: int, text: str) -> None:
        self.problem_count += 1
        if len(self.problems) < _KEPT:
            self.problems.append(Problem(line, text))

    def _source(self) -> Iterator[_records.Record]:
        read = {
            "csv": _records.table,
            "tsv": functools.partial(_records.table, mark="\t"),
            "jsonl": _records.lines,
            "json": _records.document,
            "text": functools.partial(
                _records.text, pattern=self._pattern, other=self.messages.add
            ),
            "tensorboard": _tensorboard.scalars,
        }[self.format]
        return read(self.path, self._complain)

    def records(self) -> Iterator[_records.Record]:
        """Line number and every name and value of each record, as slash paths."""
        self.problems, self.problem_count = [], 0
        self.messages = Messages()
        records = self._source()
        first = list(itertools.islice(records, _LOOK_AHEAD))
        stream = itertools.chain(first, records)
        if any(isinstance(v, dict) for _, r in first for v in r.values()):
            return ((at, _flat(record)) for at, record in stream)
        return stream

    def __iter__(self) -> Iterator[tuple[float, float, float | None]]:
        records = self.records()
        first = list(itertools.islice(records, _LOOK_AHEAD))
        self.columns = self._choose([record for _, record in first])
        return self._rows(itertools.chain(first, records))

    def _choose(self, first: list[dict[str, Any]]) -> dict[str, str | None]:
        names = dict.fromkeys(name for record in first for name in record)
        chosen = {}
        for role, name in self._named.items():
            if name is not None and name not in names:
                raise ValueError(
                    f"{self.path}: needed {role} named {name!r}, got {_some(names)}; "
                    "write one of these names"
                )
            chosen[role] = name or choose(names, role)
        if chosen["loss"] is None:
            raise ValueError(
                f"{self.path}: needed a loss, got {_some(names)} (read as "
                f"{self.format}); name the loss, or for text give a pattern with a "
                "group named loss"
            )
        return chosen

    def _rows(self, stream: Iterator[_records.Record]) -> Any:
        step_name, loss_name = self.columns["step"], self.columns["loss"]
        norm_name = self.columns["grad_norm"]
        rows = 0
        for at, record in stream:
            loss = record.get(loss_name)
            try:
                if loss.__class__ is not float:
                    loss = number(loss)
                    if loss is None:
                        continue  # an evaluation, or a metric logged at other steps
                norm = record.get(norm_name) if norm_name else None
                if norm is not None and norm.__class__ is not float:
                    norm = number(norm)
                step = record.get(step_name) if step_name else rows
                if step.__class__ is not int:
                    step = number(step)
                    if step is None or step - step != 0:
                        self._complain(at, "the step is missing")
                        continue
            except ValueError as error:
                self._complain(at, str(error))
                continue
            rows += 1
            yield step, loss, norm


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """A record with the entries of inner objects beside its own, as slash paths."""
    flat = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{inner}": v for inner, v in value.items()}
        else:
            flat[name] = value
    return flat


def _some(names: dict[str, None]) -> str:
    shown = list(names)[:12]
    more = ", ..." if len(names) > len(shown) else ""
    return (", ".join(shown) + more) if shown else "no records at all"
