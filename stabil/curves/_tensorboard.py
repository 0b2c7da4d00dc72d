"""Scalars of a TensorBoard event file, read without TensorBoard.

A file is a chain of records: length (8 bytes, little endian), its checksum (4), data,
its checksum (4). The data is a protocol buffer `Event`: step in field 2, summary in
field 5, with values in field 1 of tag (1), simple_value (2, float32) or tensor (8),
whose float_val is field 5 and whose tensor_content is field 4. Checksums are not looked
at: a damaged record shows as a broken chain.
"""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Iterator
from typing import Any

from stabil.curves._records import Complain, Record


def scalars(path: pathlib.Path, complain: Complain) -> Iterator[Record]:
    """One record per step, in the order of the file."""
    step, values, at = None, {}, 0
    for at, data in _chain(path, complain):
        here, found = _event(data)
        if not found:
            continue
        if here != step and values:
            yield at, {"step": step, **values}
            values = {}
        step = here
        values |= found
    if values:
        yield at, {"step": step, **values}


def _chain(path: pathlib.Path, complain: Complain) -> Iterator[tuple[int, bytes]]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        at = 0
        while head := file.read(12):
            at += 1
            length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else size
            if length > size:
                complain(at, "the record is damaged or cut off; the rest is not read")
                return
            data = file.read(length + 4)
            if len(data) < length + 4:
                complain(at, "the record is cut off")
                return
            yield at, data[:-4]


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and values of a protocol buffer message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            value, at = data[at : at + width], at + width
        elif kind == 2:
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        else:
            return
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return value, at


def _event(data: bytes) -> tuple[int, dict[str, float]]:
    step, found = 0, {}
    for field, value in _fields(data):
        if field == 2 and isinstance(value, int):
            step = value
        elif field == 5 and isinstance(value, bytes):
            for inner, one in _fields(value):
                if inner == 1 and isinstance(one, bytes):
                    found |= _scalar(one)
    return step, found


def _scalar(data: bytes) -> dict[str, float]:
    tag, number = "", None
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")
        elif field == 2 and isinstance(value, bytes) and len(value) == 4:
            number = struct.unpack("<f", value)[0]
        elif field == 8 and isinstance(value, bytes):
            number = _tensor(value)
    return {} if number is None else {tag: number}


def _tensor(data: bytes) -> float | None:
    for field, value in _fields(data):
        if field in (4, 5) and isinstance(value, bytes) and len(value) == 4:
            return struct.unpack("<f", value)[0]
    return None
