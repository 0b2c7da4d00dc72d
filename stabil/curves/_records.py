"""Records of a log, whatever its format: (line number, dict of names and values)."""

from __future__ import annotations

import csv
import gzip
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import IO, Any

Record = tuple[int, dict[str, Any]]
Complain = Callable[[int, str], None]

_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?inf(?:inity)?|[-+]?nan)\b"
_TEXT = {
    "step": re.compile(r"\b(?:step|iter(?:ation)?)\b[\"']?\s*[:=]?\s*(\d+)", re.I),
    "loss": re.compile(
        rf"([a-z]*)[ /_.]?(?<![a-z])loss\b[\"']?\s*[:=|]?\s*{_NUMBER}", re.I
    ),
    "grad_norm": re.compile(
        rf"\b(?:grad(?:ient)?[ _]?norm|gnorm|norm)\b[\"']?\s*[:=|]?\s*{_NUMBER}", re.I
    ),
}
_FOREIGN = {"eval", "val", "valid", "validation", "test", "dev"}


def open_text(path: pathlib.Path) -> IO[str]:
    """The file as text; bytes that are no text become marks, gzip is unpacked."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace", newline="")
    return open(path, encoding="utf-8-sig", errors="replace", newline="")


def detect(path: pathlib.Path) -> str:
    """The format of a file: csv, tsv, json, jsonl, tensorboard or text."""
    names = [s for s in path.suffixes if s != ".gz"]
    if "tfevents" in path.name:
        return "tensorboard"
    suffix = names[-1] if names else ""
    if suffix in (".csv", ".tsv", ".jsonl"):
        return suffix[1:]
    if suffix == ".ndjson":
        return "jsonl"
    with open_text(path) as file:
        head = file.read(4096)
    first, _, rest = head.strip().partition("\n")
    if suffix == ".json" and not (first.startswith("{") and rest.startswith("{")):
        return "json"
    if first.startswith("{"):
        return "jsonl"
    if "," in first and "loss" in first.lower() and not re.search(r"\d", first):
        return "csv"
    return "text"


def table(path: pathlib.Path, complain: Complain, mark: str = ",") -> Iterator[Record]:
    """Rows of a table with a head."""
    with open_text(path) as file:
        rows = csv.reader(file, delimiter=mark)
        head = [name.strip() for name in next(rows, [])]
        for row in rows:
            if not row:
                continue
            if len(row) != len(head):
                text = f"{len(head)} cells needed, {len(row)} found"
                complain(rows.line_num, text)
                continue
            yield rows.line_num, dict(zip(head, row, strict=True))


def lines(path: pathlib.Path, complain: Complain) -> Iterator[Record]:
    """One JSON object a line."""
    decoder = json.JSONDecoder()
    start = decoder.raw_decode
    with open_text(path) as file:
        for at, line in enumerate(file, 1):
            try:
                if line[0] == "{":
                    record, end = start(line)
                    if line[end:] != "\n" and line[end:].strip():
                        record = decoder.decode(line)  # says what is wrong
                else:
                    record = decoder.decode(line)
            except ValueError as error:
                if line.strip():
                    complain(at, f"no JSON: {error}")
                continue
            if isinstance(record, dict):
                yield at, record
            else:
                complain(at, f"JSON object needed, {type(record).__name__} found")


def document(path: pathlib.Path, complain: Complain) -> Iterator[Record]:
    """A whole JSON document: a list of objects, or one with `log_history`."""
    with open_text(path) as file:
        whole = json.load(file)
    if isinstance(whole, dict):
        whole = whole.get("log_history", whole.get("history", whole.get("data")))
    if not isinstance(whole, list):
        raise ValueError(
            f"{path}: needed a JSON list of records, or an object with log_history as "
            "Hugging Face writes it; write one JSON object a line and name it .jsonl"
        )
    for at, record in enumerate(whole, 1):
        if isinstance(record, dict):
            yield at, record
        else:
            complain(at, f"JSON object needed, {type(record).__name__} found")


def text(
    path: pathlib.Path,
    complain: Complain,
    pattern: str | None = None,
    other: Complain | None = None,
) -> Iterator[Record]:
    """Lines that match a pattern with named groups, or that look like metrics.

    Any other line is normal in a text, and is handed to `other`.
    """
    del complain
    find = _built_in if pattern is None else _by(pattern)
    with open_text(path) as file:
        for at, line in enumerate(file, 1):
            record = find(line)
            if record:
                yield at, record
            elif other is not None:
                other(at, line)


def _by(pattern: str) -> Callable[[str], dict[str, Any] | None]:
    compiled = re.compile(pattern)
    if "loss" not in compiled.groupindex:
        raise ValueError(
            f"needed a pattern with a group named loss, got {pattern!r}; write for "
            r"example 'step (?P<step>\d+) loss (?P<loss>\S+) norm (?P<grad_norm>\S+)'"
        )

    def find(line: str) -> dict[str, Any] | None:
        match = compiled.search(line)
        return match.groupdict() if match else None

    return find


def _built_in(line: str) -> dict[str, Any] | None:
    for match in _TEXT["loss"].finditer(line):
        if match[1].lower() in _FOREIGN:
            continue
        record = {"loss": match[2]}
        for name in ("step", "grad_norm"):
            other = _TEXT[name].search(line)
            if other:
                record[name] = other[1]
        return record
    return None
