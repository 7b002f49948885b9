"""`hermes-rl export RUN --to FORMAT`: a run in the format of another tool."""

from __future__ import annotations

import argparse
from pathlib import Path

from environments.errors import UsageError

EXAMPLE = "hermes-rl export runs/terminal_tasks --to inspect"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from environments.runs.exports import FORMATS

    says = "; ".join(f"{name}: {form.says}" for name, form in FORMATS.items())
    parser.add_argument("run", metavar="RUN", type=Path, help="a rollouts.jsonl, or the folder of a run")
    parser.add_argument("--to", required=True, choices=tuple(FORMATS), metavar="FORMAT", help=says)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: RUN/FORMAT)")


def run(args: argparse.Namespace) -> int:
    """Write the files and print where they are."""
    from environments.runs.exports import export_run
    from environments.runs.report.html_page import UnreadableRun, find_rollouts, read_rollouts

    source = find_rollouts(args.run)
    if not source.is_file():
        raise UsageError(f"there is no rollouts.jsonl at {args.run}")
    folder: Path = args.out or source.parent / args.to
    try:
        written = export_run(source, read_rollouts(source), args.to, folder)
    except UnreadableRun as error:
        raise UsageError(str(error)) from error
    if not written:
        raise UsageError(f"{source} holds no rollouts")
    print(f"{len(written)} files in {folder}")
    return 0
