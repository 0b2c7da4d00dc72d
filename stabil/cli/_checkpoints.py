"""`stabil checkpoints`: list, verify, judge, compare and roll back steps of a run."""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from typing import Any


def add_command(commands: Any) -> None:
    """Adds the subcommand to the parser."""
    parser = commands.add_parser(
        "checkpoints",
        help="list, verify, judge, compare and roll back the steps of a run",
        description=(
            "Works on the folder of a run that is not open. RUN is the folder that a "
            "Keeper made, or one that holds it as RUN/checkpoints; for ls and verify "
            "also the URL of its remote level."
        ),
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add(actions, "ls", _ls, "every step with its tag and the cause")
    verify = _add(actions, "verify", _verify, "compare every byte with its digest")
    verify.add_argument("--step", type=int, help="this step only")
    mark = _add(actions, "mark", _mark, "judge a step")
    mark.add_argument("step", type=int)
    mark.add_argument("tag", choices=("healthy", "suspect"))
    mark.add_argument("--cause", default="", help="why, for people")
    two = _add(actions, "diff", _diff, "which leaves of two steps differ, by how much")
    two.add_argument("a", type=int, metavar="A", help="a step, also a quarantined one")
    two.add_argument("b", type=int, metavar="B", help="another step")
    back = _add(actions, "rollback", _rollback, "set aside what came after a step")
    back.add_argument(
        "--before",
        type=int,
        required=True,
        metavar="STEP",
        help="go back to the newest healthy step below this one",
    )
    back.add_argument("--reason", default="asked for by hand", help="for people")


def _add(actions: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=text.capitalize() + ".")
    parser.add_argument("folder", metavar="RUN")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=functools.partial(_run, run))
    return parser


def _run(action: Any, args: argparse.Namespace) -> int:
    """Runs an action on a keeper's folder; that there is no way is a finding."""
    from stabil.checkpoints import DamagedError, NoHealthyStepError, UnreadableError
    from stabil.cli._output import print_json

    try:
        return action(args, _keeper_place(args.folder, args.action))
    except (DamagedError, NoHealthyStepError, UnreadableError) as error:
        print(f"stabil checkpoints {args.action}: {error}", file=sys.stderr)
        if args.json:
            print_json({"error": str(error)})
        return 1


def _ls(args: argparse.Namespace, folder: Any) -> int:
    from stabil import checkpoints
    from stabil.cli._output import print_json, table

    steps = checkpoints.list_steps(folder)
    if args.json:
        print_json({"folder": str(folder), "steps": [s._asdict() for s in steps]})
        return 0
    head = ["step", "tag", "MB", "saved", "by", "cause"]
    rows = [
        [s.step, s.tag, f"{s.size / 1e6:.1f}", s.saved or "-", s.by or "-", s.cause]
        for s in steps
    ]
    print(table(head, rows) if rows else f"no steps in {folder}")
    return 0


def _verify(args: argparse.Namespace, folder: Any) -> int:
    from stabil import checkpoints
    from stabil.cli._output import print_json

    found = []
    for one in checkpoints.verify(folder, args.step):
        found.append(one)
        state = "as it was saved" if one.ok else f"DAMAGED: {one.problem}"
        line = f"step {one.step} ({one.tag}): {one.leaves} leaves, {state}"
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)
    damaged = [one.step for one in found if not one.ok]
    if args.json:
        steps = [one._asdict() for one in found]
        print_json({"folder": str(folder), "steps": steps, "damaged": damaged})
    elif not found:
        print(f"no steps in {folder}")
    return 1 if damaged else 0


def _mark(args: argparse.Namespace, folder: Any) -> int:
    from stabil import checkpoints
    from stabil.cli._output import print_json

    tag = checkpoints.mark(folder, args.step, args.tag, args.cause, by="stabil mark")
    taken = tag == args.tag
    if args.json:
        print_json({"step": args.step, "tag": tag, "asked": args.tag, "taken": taken})
    elif taken:
        print(f"step {args.step} is {tag}")
    else:
        print(f"step {args.step} is {tag}, not {args.tag}: it holds non-finite entries")
    return 0 if taken else 1


def _diff(args: argparse.Namespace, folder: Any) -> int:
    from stabil import checkpoints
    from stabil.cli._output import print_json, table

    found = checkpoints.diff(folder, args.a, args.b)
    if args.json:
        leaves = [leaf._asdict() for leaf in found.leaves]
        print_json({"a": args.a, "b": args.b, **found._asdict(), "leaves": leaves})
    else:
        head = [
            "leaf",
            "before",
            "after",
            "entries",
            "largest",
            "relative",
            "not finite",
        ]
        rows = [
            [
                x.name,
                x.before or "absent",
                x.after or "absent",
                f"{x.entries}/{x.size}",
                f"{x.largest:.3g}",
                f"{x.relative:.3g}",
                x.nonfinite,
            ]
            for x in found.leaves
        ]
        if rows:
            print(table(head, rows))
        print(f"{found.same} leaves are the same, {len(rows)} are not")
        for text in found.metadata:
            print(text)
    return 1 if found.leaves or found.metadata else 0


def _rollback(args: argparse.Namespace, folder: Any) -> int:
    from stabil import checkpoints
    from stabil.cli._output import print_json

    record = checkpoints.rollback(folder, args.before, args.reason)
    if args.json:
        print_json(record)
    else:
        print(f"the run goes on from step {record['target']}; what came after it is in")
        print(folder / "_quarantine" / record["id"])
    return 0


def _keeper_place(text: str, action: str) -> pathlib.Path | str:
    """The folder that a Keeper made, the one named or `checkpoints` in it; or a URL."""
    if "://" in text:
        if action in ("ls", "verify"):
            return text
        raise ValueError(
            f"needed a folder on this machine for {action}, got {text}: name the "
            "folder of the run, whose Keeper brings tags and rollbacks there; or bring "
            f"the newest step to a new folder with Keeper(folder, remote={text!r})"
        )
    folder = pathlib.Path(text)
    inner = folder / "checkpoints"
    return inner if inner.is_dir() and not (folder / "stabil.json").exists() else folder
