"""`hermes-rl view`: a rollouts.jsonl as one self-contained HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from environments.errors import UsageError, at_least

EXAMPLE = "hermes-rl view runs/demo/rollouts.jsonl --open"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="a rollouts.jsonl, or the folder of a run")
    parser.add_argument(
        "--output", metavar="HTML", type=Path, help="where to write (default: report.html in its folder)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument(
        "--max-chars",
        type=at_least(100),
        default=20_000,
        metavar="N",
        help="cut longer texts in the middle (default: 20000)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and print where it is."""
    from environments.runs.report import build_report
    from environments.runs.report.html_page import UnreadableRun, find_rollouts, read_rollouts
    from environments.runs.store import write_whole

    source = find_rollouts(args.file)
    output: Path = args.output or source.with_name("report.html")
    try:
        page = build_report(read_rollouts(source), title=str(source), max_chars=args.max_chars)
    except UnreadableRun as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror or error}") from error
    write_whole(output, page.encode())
    print(output)
    if args.open:
        import webbrowser

        webbrowser.open(output.resolve().as_uri())
    return 0
