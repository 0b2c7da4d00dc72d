"""Starts a training process again when it dies or hangs, as long as that helps."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from stabil.session._exit import ExitCode
from stabil.telemetry import Beat, Event, EventLog, read_beat

_LIVES = ("starting", "running", "paused")
_LONG = ("starting", "paused")  # states without steps


class Supervisor:
    """Runs a command until it is done, within a budget of restarts without progress.

    Its only contract with the process is the run's folder: `heartbeat.json` tells
    whether it lives and how far it is, and why it ended. A scheduler that starts jobs
    again can do the same: restart on every exit code but 0, 76 and 77, and kill a job
    whose heartbeat is older than `hang_seconds`. Of a run with several processes, each
    has a supervisor of its own; one that dies or hangs takes the others along, and all
    start again from the newest healthy step.

    Args:
      command: program and arguments.
      run_dir: the `run_dir` of its `Session`.
      restarts: starts in a row that may end without a new furthest step.
      hang_seconds: age of the heartbeat at which a running process counts as hung.
      start_seconds: the same until the first step is done, for imports and compiling,
        and within `Session.pause`.
      poll_seconds: time between two looks.
      grace_seconds: time from the request to end to the kill, for the last save.
      pause_seconds: wait before the first restart; doubles while there is no progress.

    Raises:
      ValueError: an empty command or a number out of range.
    """

    def __init__(
        self,
        command: Sequence[str],
        run_dir: str | pathlib.Path,
        *,
        restarts: int = 3,
        hang_seconds: float = 600.0,
        start_seconds: float = 3600.0,
        poll_seconds: float = 1.0,
        grace_seconds: float = 120.0,
        pause_seconds: float = 5.0,
    ):
        if not command:
            raise ValueError(
                "Supervisor: needed a command, got none; write stabil run RUN -- "
                "python train.py"
            )
        if restarts < 0 or min(hang_seconds, start_seconds, poll_seconds) <= 0:
            raise ValueError(
                "Supervisor: needed restarts >= 0 and hang_seconds, start_seconds and "
                f"poll_seconds > 0, got {restarts}, {hang_seconds}, {start_seconds} "
                f"and {poll_seconds}"
            )
        self._command = list(command)
        self._folder = pathlib.Path(run_dir)
        self._restarts = restarts
        self._hang, self._start = hang_seconds, start_seconds
        self._poll, self._pause = poll_seconds, pause_seconds
        self._grace = grace_seconds
        # Furthest step of all starts before this one, and of this one.
        self._furthest = self._newest = -1
        self._asked_to_end = False
        self.starts = 0

    def run(self) -> int:
        """Runs until the process is done, a person must look, or the budget is spent.

        Returns:
          0 when the run has ended; 76 or 77 as the process said; else the code of the
          last process, or 77 when the budget is spent.
        """
        log: EventLog | None = None
        idle = 0
        before = self._pass_on_terminations()
        try:
            while True:
                code, why = self._once()
                # The folder is the session's to make: it refuses one that holds files.
                if log is None and self._folder.is_dir():
                    log = EventLog(self._folder / "events-supervisor.jsonl")
                idle = 0 if self._newest > self._furthest else idle + 1
                self._furthest = max(self._furthest, self._newest)
                final = self._final(code, idle)
                self._tell(log, final, code, why)
                if final is not None:
                    return final
                try:
                    time.sleep(self._pause * 2 ** max(0, idle - 1))
                except KeyboardInterrupt:  # nothing runs that could be asked to save
                    return code
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)
            if log is not None:
                log.close()

    def _pass_on_terminations(self) -> Any:
        """Lets SIGTERM end the process like Ctrl-C; the handler that was there."""

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        if threading.current_thread() is threading.main_thread():
            return signal.signal(signal.SIGTERM, interrupt)
        return None

    def _final(self, code: int, idle: int) -> int | None:
        last = (ExitCode.DONE, ExitCode.RESTART_ELSEWHERE, ExitCode.PERSON)
        if code in tuple(map(int, last)) or self._asked_to_end:
            return code
        return int(ExitCode.PERSON) if idle > self._restarts else None

    def _once(self) -> tuple[int, str]:
        """Runs the process once; its code, and why it ended."""
        self.starts += 1
        begun = time.time()
        process = subprocess.Popen(self._command)
        try:
            while process.poll() is None:
                time.sleep(self._poll)
                why = self._hung(begun)
                if why:
                    self._end(process)
                    return int(ExitCode.RESTART), why
        except KeyboardInterrupt:
            self._asked_to_end = True
            self._end(process)
        code = int(process.returncode)
        # What the process wrote last is worth more than the code of a wrapper.
        beats = self._beats(begun)
        own = [b for b in beats if b.pid == process.pid]
        codes = [b.exit_code for b in own or beats if b.exit_code]
        code = codes[0] if codes else code
        return code, f"the process ended with code {code}"

    def _hung(self, begun: float) -> str:
        """Why the process counts as hung; empty while it lives.

        Of several processes that share the folder the most silent one counts: the
        others can do nothing but wait for it.
        """
        silent = [
            (beat.age(), self._start if beat.state in _LONG else self._hang)
            for beat in self._beats(begun)
            if beat.state in _LIVES
        ]
        for waited, limit in silent or [(time.time() - begun, self._start)]:
            if waited > limit:
                return f"no sign of life for {waited:.0f} seconds"
        return ""

    def _end(self, process: subprocess.Popen[Any]) -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(self._grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _beats(self, begun: float) -> list[Beat]:
        """What the processes of this start have told so far, the first one first."""
        found = map(read_beat, sorted(self._folder.glob("heartbeat*.json")))
        beats = [beat for beat in found if beat is not None]
        self._newest = max([self._newest, *(beat.step for beat in beats)])
        return [beat for beat in beats if beat.time >= begun]

    def _tell(
        self, log: EventLog | None, final: int | None, code: int, why: str
    ) -> None:
        action = "supervisor_end"
        if final is None:
            action = "supervisor_restart"
            print(f"stabil run: {why}; starting it again", file=sys.stderr)
        if log is None:
            return
        numbers = dict(code=code, starts=self.starts, furthest=self._furthest)
        log.add(Event(action=action, step=self._newest, text=why, numbers=numbers))
        log.flush()
