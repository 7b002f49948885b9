"""`hermes-rl compare A B`: two runs over the same items."""

from __future__ import annotations

import argparse
from pathlib import Path

from environments.consoles import PIPE_WIDTH, new_console
from environments.errors import UsageError

EXAMPLE = "hermes-rl compare runs/before runs/after"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "a rollouts.jsonl, the folder of a run, or a folder of runs"
    parser.add_argument("a", metavar="A", type=Path, help=f"the run to compare with: {kinds}")
    parser.add_argument("b", metavar="B", type=Path, help="the run that is asked about")
    parser.add_argument(
        "--cluster",
        choices=("item", "category"),
        default="item",
        help="what belongs together in the interval: rollouts of an item, or items of a category (default: item)",
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with both transcripts of every item")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the difference of B to A."""

    import orjson

    from environments.runs.comparison import CLUSTERS, compare, read_run, render

    records_a, records_b = read_run(args.a), read_run(args.b)
    found = compare(records_a, records_b, str(args.a), str(args.b), CLUSTERS[args.cluster])
    if not found.pairs:
        raise UsageError(
            f"{args.a} and {args.b} have no item in common ({len(found.only_a)} and {len(found.only_b)} items): "
            "compare runs over the same items, such as two with the same env.seed"
        )
    if args.json:
        print(orjson.dumps(found.to_dict(), option=orjson.OPT_INDENT_2).decode())
    else:
        new_console(pipe_width=PIPE_WIDTH, emoji=False).print(render(found))
    if args.html is not None:
        from environments.runs.report.html_page import build_comparison
        from environments.runs.store import write_whole

        write_whole(args.html, build_comparison(found, records_a, records_b).encode())
        print(args.html)
    return 0
