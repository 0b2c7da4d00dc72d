"""One event: what was found or done at one step, as one JSON object."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

SCHEMA = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that was found or done, with place, cause and figures.

    Attributes:
      action: what was done: a kind of `stabil.policy.Action`, or `start`, `resume`,
        `pause`, `save_failed`, `emergency_save`, `hung`, `dropped`, `end` and the like.
      step: step number, counted from 0; -1 when there is none.
      cause: names of the causes, joined by commas; empty without one.
      severity: `ok`, `watch`, `warn` or `block`.
      layer: the first offending signal, for example `activations/block_3/mlp`.
      data_index: position of the step's batch in the data.
      batch_id: what the user calls the batch.
      micro_batch: position in the accumulation window, counted from 0.
      device: the device that was named, where one was.
      dtype: data type of the offending signal, where it is known.
      text: one plain sentence.
      numbers: figures behind it, ready for JSON; NaN and infinities are kept.
      run, process, code_version: filled in by the log.
      time: seconds since 1970, UTC; filled in by the log.
      schema: version of these fields.
    """

    action: str
    step: int = -1
    cause: str = ""
    severity: str = "ok"
    layer: str | None = None
    data_index: int | None = None
    batch_id: str | None = None
    micro_batch: int | None = None
    device: str | None = None
    dtype: str | None = None
    text: str = ""
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    run: str = ""
    process: int = 0
    code_version: str = ""
    time: float = 0.0
    schema: int = SCHEMA

    def to_json(self) -> str:
        """One line of strict JSON: a number that is not finite becomes its name.

        Examples:
          >>> e = Event(action="skip", step=3, numbers={"loss": math.inf})
          >>> '"loss": "Infinity"' in e.to_json(), Event.from_json(e.to_json()) == e
          (True, True)
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # Schema, run and step first: they are what a person looks for in a line.
        order = ("schema", "run", "step", "action", *fields)
        line = {name: fields[name] for name in order}
        line["numbers"] = _without_nonfinite(self.numbers)
        return json.dumps(line, allow_nan=False, default=str)

    @classmethod
    def from_json(cls, line: str | bytes) -> Event:
        """The event of one line; unknown fields are left out.

        Raises:
          ValueError: not a JSON object, no event, or written by a newer schema.
        """
        fields = json.loads(line)
        if not isinstance(fields, dict) or "action" not in fields:
            raise ValueError(f"needed one event as a JSON object, got {line!r:.200}")
        if fields.get("schema", SCHEMA) > SCHEMA:
            raise ValueError(
                f"needed an event of schema {SCHEMA} or older, got {fields['schema']}; "
                "read this log with a newer stabil"
            )
        known = {f.name for f in dataclasses.fields(cls)}
        fields = {k: v for k, v in fields.items() if k in known}
        fields["numbers"] = _with_nonfinite(fields.get("numbers") or {})
        return cls(**fields)


_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _without_nonfinite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nonfinite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    return value


def _with_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _with_nonfinite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_nonfinite(v) for v in value]
    return _NAMES.get(value, value) if isinstance(value, str) else value
