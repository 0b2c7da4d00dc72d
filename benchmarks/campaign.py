"""Random faults of every kind, time, place and size: protected against the rest.

    python benchmarks/campaign.py [--trials N] [--seed S] [--json] [--rows FILE]
        [--only METHOD ...] [--numbers I ...]

Each trial trains the demo's model, made small, through one fault (or none), with the
whole session: guard, probe, `Session`, `Keeper`, `Ladder`, all with their defaults. The
same fault meets AdamW alone and AdamW with one measure each: a clip of the global norm
at 1, `optax.apply_if_finite`, the skip rule of OLMo and MaxText, ZClip. All runs of a
trial have one seed and one order of data; "off" compares the held-out loss at the end
with that of the clean run. Faults are drawn in `campaign_faults.py`.

`finished_share`, `within_1_percent_share`: of all trials, fault-free ones included.
`nonfinite_params`: trials whose parameters are not finite at the end.
`poisoned_healthy_checkpoints`: checkpoints tagged healthy that hold a NaN, or whose
held-out loss is not within 10 % of the clean run's as many steps before as the fault
struck: what a run has that refuses every struck step and nothing else.
`culprit_named_share`: of the faults that struck arrays and made AdamW alone end more
than 1 % off: whether the first alarm came while the fault struck (lasting damage:
within 10 steps) and named the module.
`false_interventions`: skips, restarts of moments, cuts, rollbacks and stops before the
fault, or in a run without one; `false_clips` likewise.

The setting is quiet enough for that: one batch left out of a run changes its loss at
the end by 0.05 % (root mean square of 15). Rows go to a file as they are made; `--rows`
names it, and a campaign that was cut short goes on where it stood. A trial costs about
four seconds of one core, and two more for the single measures.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# So small a model is slower on several threads.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import campaign_faults as faults  # noqa: E402
import campaign_runs as runs  # noqa: E402
import campaign_score as scores  # noqa: E402
import jax  # noqa: E402
from campaign_session import Protected, Protection  # noqa: E402

from stabil.cli import _demo_model  # noqa: E402
from stabil.session import Supervisor  # noqa: E402
from stabil.telemetry import Event  # noqa: E402
from stabil.testing import inject  # noqa: E402

SIZE = _demo_model.Size(layers=2, width=16, heads=2, context=16, batch=16, peak=5e-3)
STEPS = 200


class Campaign:
    """Compiles every method once and runs trials.

    Args:
      seed: of the campaign; with a trial's number it decides the trial.
      setting: what to train.
      only: names of methods to run besides the protected one; None runs all.
      process: whether trials may kill or hang a process.
    """

    def __init__(
        self,
        seed: int,
        setting: runs.Setting,
        only: list[str] | None = None,
        process: bool = True,
    ):
        self.seed, self.setting, self.process = seed, setting, process
        self.protection = Protection(setting)
        self._methods = runs.methods(setting)
        self._loops = {
            name: runs.loop(setting, tx)
            for name, tx in self._methods.items()
            if only is None or name in only or name == "unprotected"
        }
        self._clean: dict[int, dict[str, Any]] = {}
        if process and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            # Processes that are started again find the step compiled.
            cache = tempfile.mkdtemp(prefix="campaign-cache-")
            os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
            jax.config.update("jax_compilation_cache_dir", cache)
            atexit.register(shutil.rmtree, cache, ignore_errors=True)

    def trial(self, number: int) -> faults.Trial:
        names = {
            "parameters": self.setting.leaves,
            "activations": self.setting.modules,
        }
        steps = self.setting.steps
        return faults.draw(number, self.seed, steps, names, self.process)

    def row(self, number: int) -> dict[str, Any]:
        """Runs one trial with every method."""
        trial, began = self.trial(number), time.perf_counter()
        folder = pathlib.Path(tempfile.mkdtemp(prefix="campaign-"))
        try:
            if trial.place == "process":
                seen = self._supervised(trial, folder)
            else:
                seen = self.protection.run(trial, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        others = {n: self._run(n, trial) for n in self._loops} if trial.fault else {}
        clean = self._clean_run(trial.seed)
        row = scores.score(trial, seen, clean, others, runs.LEVEL_EVERY)
        return row | {"seconds": round(time.perf_counter() - began, 2)}

    def _run(self, name: str, trial: faults.Trial) -> dict[str, Any]:
        names = self.setting.dial_names(self._methods[name])
        dial = inject.Dial.of(trial.fault, names)
        params = self.setting.params(trial.seed)
        found = self._loops[name](params, self.setting.tokens(trial.seed), dial)
        found = jax.device_get(found)
        return {
            "loss": float(found["loss"]),
            "sound": bool(found["sound"]),
            "levels": found["levels"].tolist(),
        }

    def _clean_run(self, seed: int) -> dict[str, Any]:
        if seed not in self._clean:
            bare = faults.Trial(-1, seed, "none", None)
            self._clean[seed] = self._run("unprotected", bare)
        return self._clean[seed]

    def _supervised(self, trial: faults.Trial, folder: pathlib.Path) -> Protected:
        """The trial in a process of its own, which a supervisor starts again."""
        result = folder / "result.json"
        where = ("--worker", str(folder), "--seed", str(self.seed))
        command = [sys.executable, __file__, "--numbers", str(trial.number), *where]
        supervisor = Supervisor(
            command, folder / "run", hang_seconds=10, poll_seconds=0.2, pause_seconds=0
        )
        code = supervisor.run()
        if not result.exists():
            nothing = {"steps_lost": 0, "actions": {}}
            why = f"the supervisor gave up with code {code}"
            return Protected(False, why, math.nan, False, 0, nothing, [], {})
        found = json.loads(result.read_text())
        events = [Event(**e) for e in found.pop("events")]
        healthy = {int(s): v for s, v in found.pop("healthy").items()}
        return Protected(events=events, healthy=healthy, **found)


def work(campaign: Campaign, number: int, folder: pathlib.Path) -> None:
    """One protected run in this process; its result goes to a file."""
    seen = campaign.protection.run(campaign.trial(number), folder)
    events = [{"action": e.action, "step": e.step, "cause": e.cause,
               "severity": e.severity, "layer": e.layer, "data_index": e.data_index}
              for e in seen.events]  # fmt: skip
    found = seen._asdict() | {"events": events}
    found["summary"] = {k: seen.summary[k] for k in ("steps_lost", "actions")}
    (folder / "result.json").write_text(json.dumps(found))


def run(
    campaign: Campaign, numbers: list[int], path: pathlib.Path, quiet: bool = False
) -> list[dict[str, Any]]:
    """Runs the trials that the file of rows does not hold yet; all rows."""
    rows: dict[int, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[row["trial"]] = row
    begun = time.perf_counter()
    todo = [n for n in numbers if n not in rows]
    with path.open("a") as file:
        for done, number in enumerate(todo, 1):
            rows[number] = campaign.row(number)
            file.write(json.dumps(rows[number]) + "\n")
            file.flush()
            if not quiet:
                _tell(done, len(todo), time.perf_counter() - begun, rows[number])
    return [rows[n] for n in numbers]


def _tell(done: int, of: int, seconds: float, row: dict[str, Any]) -> None:
    what = "ok" if row["ended"] and row["within"] else "FAILED"
    text = (
        f"trial {done} of {of}, {seconds:.0f} s: {' and '.join(row['planted'])}: {what}"
    )
    print(text, file=sys.stderr, flush=True)


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "summary": scores.summarize(rows),
        "kinds": scores.by_kind(rows),
        "trials": rows,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=pathlib.Path, help="file of rows to go on with")
    parser.add_argument("--only", nargs="*", help="measures to compare with")
    parser.add_argument("--numbers", nargs="*", type=int, help="these trials alone")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    campaign = Campaign(args.seed, runs.Setting(SIZE, STEPS), args.only)
    if args.worker:
        work(campaign, args.numbers[0], args.worker)
        return 0
    path = args.rows
    if path is None:
        path = pathlib.Path(tempfile.mkdtemp(prefix="campaign-")) / "rows.jsonl"
    print(f"rows: {path}", file=sys.stderr)
    found = report(run(campaign, args.numbers or list(range(args.trials)), path))
    print(json.dumps(found) if args.json else scores.as_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
