"""`stabil demo`: one model through real faults, without protection and with it."""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import time
from typing import Any


def add_command(commands: Any) -> None:
    """Adds the subcommand to the parser."""
    parser = commands.add_parser(
        "demo",
        help="train a small language model through planted faults, and show it",
        description=(
            "Trains a byte-level GPT of about one million parameters on Python's own "
            "standard library three times from one seed: clean; through five planted "
            "faults without protection; through the same faults under stabil. Takes a "
            "few minutes on two cores. Exit code 1 if the protected run ended more "
            "than 1 %% above the clean run's loss."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--steps", type=int, default=1000, help="steps of each run (default 1000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything")
    parser.add_argument(
        "--run-dir",
        type=pathlib.Path,
        default=None,
        help="an empty or new folder for the run (default: stabil-demo-DATE-TIME)",
    )
    parser.add_argument(
        "--no-picture", action="store_true", help="do not draw; needs no matplotlib"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the demo and prints its report; 0 if the protected run held, else 1."""
    from stabil.cli._demo_model import Size
    from stabil.cli._output import Progress, print_json

    if args.steps < 200:
        raise ValueError(
            f"needed --steps of at least 200, got {args.steps}: with fewer, the faults "
            "strike before the run knows what is normal; write stabil demo --steps 200"
        )
    if args.seed < 0:
        raise ValueError(f"needed --seed of at least 0, got {args.seed}")
    report = make_report(
        Size(),
        steps=args.steps,
        seed=args.seed,
        folder=new_folder(args.run_dir),
        picture=not args.no_picture,
        progress=Progress(),
    )
    if args.json:
        print_json(report)
    else:
        from stabil.cli._demo_report import as_text

        print(as_text(report))
    return 0 if report["passed"] else 1


def new_folder(wanted: pathlib.Path | None) -> pathlib.Path:
    """Makes the run's folder.

    Raises:
      ValueError: it exists and is not empty; nothing is overwritten.
    """
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = wanted or pathlib.Path(f"stabil-demo-{now}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"needed an empty or new folder for --run-dir, got {folder}, which holds "
            "something; write another name, or leave --run-dir out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_report(
    size: Any,
    *,
    steps: int,
    seed: int,
    folder: pathlib.Path,
    picture: bool,
    progress: Any,
) -> dict[str, Any]:
    """Trains the three runs and returns the report that `--json` prints.

    Args:
      size: `Size` of the model.
      steps: steps of each run.
      seed: of the model, of the order of the data and of the faults.
      folder: an empty folder for checkpoints, events, report and picture.
      picture: whether to draw.
      progress: a `Progress` to show lines on.
    """
    from stabil.cli import _demo_faults, _demo_report
    from stabil.cli._demo_data import read_corpus
    from stabil.cli._demo_protected import train_protected
    from stabil.cli._demo_train import Task, train_plainly

    began = time.perf_counter()
    task = Task(size, steps, seed, read_corpus())
    plan = _demo_faults.plan(steps, size.layers, seed)
    schedule = _demo_faults.schedule(plan)

    def teller(number: int, name: str) -> Any:
        def tell(done: int, loss: float) -> None:
            seconds = time.perf_counter() - began
            progress.show(
                f"run {number} of 3, {name}: step {done} of {steps}, loss {loss:.3f}, "
                f"{seconds:.0f} s",
                last=done >= steps,
            )

        return tell

    clean = train_plainly("clean", task, (), teller(1, "clean"))
    ruined = train_plainly("unprotected", task, schedule, teller(2, "unprotected"))
    kept, seen, rollbacks = train_protected(
        task, schedule, folder, teller(3, "protected")
    )
    runs = {
        "clean": _demo_report.run_row(clean),
        "unprotected": _demo_report.run_row(ruined),
        "protected": _demo_report.guarded_row(kept, seen, rollbacks),
    }
    faults = _demo_report.fault_rows(plan, seen, rollbacks)
    checks = _demo_report.verdict(runs, faults)
    drawing = folder / "demo.png"
    if picture:
        from stabil.cli._demo_picture import draw

        events = _demo_report.interventions(seen, rollbacks)
        draw(drawing, [clean, ruined, kept], faults, events)
    report = {
        "command": "demo",
        "passed": checks["within_1_percent"]
        and checks["ran_to_the_end"]
        and checks["parameters_always_finite"],
        "checks": checks,
        "runs": runs,
        "faults": faults,
        "steps": steps,
        "seed": seed,
        "corpus": {"files": task.corpus.files, "train_bytes": len(task.corpus.train)},
        "folder": str(folder),
        "picture": str(drawing) if picture else None,
        "seconds": round(time.perf_counter() - began, 1),
    }
    from stabil.cli._output import plain

    text = json.dumps(plain(report), indent=1, allow_nan=False)
    (folder / "report.json").write_text(text + "\n")
    return report
