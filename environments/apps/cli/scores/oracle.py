"""`hermes-rl oracle NAME ...`: benchmarks played by their own right answers and by a no-op, as a table."""

from __future__ import annotations

import argparse
from pathlib import Path

from environments.consoles import new_console

EXAMPLE = "hermes-rl oracle code_tasks --env.eval_items 2"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="CONFIG", nargs="+", help="configs of benchmarks, such as agentdojo")
    parser.add_argument("--out", type=Path, default=Path("runs/oracle"), help="where the runs go (default runs/oracle)")
    parser.add_argument("--fresh", action="store_true", help="start over instead of resuming")


def run(args: argparse.Namespace) -> int:
    """Evaluate each twice, and print the table; exit code 1 when the oracle fails an item."""
    from environments.benchmarks.oracle_table import on_terminal, oracle_row, table
    from environments.config.yaml_file import find_config
    from environments.launch import configure_logging, load_environment, run_verb
    from environments.runs.comparison import read_run

    for name in args.names:
        find_config(name)
    configure_logging()
    rows = []
    for name in args.names:
        stem = Path(name).stem
        for policy in ("oracle", "nop"):
            settings = [*args.settings, "--openai.options.policy", policy]
            run_verb(load_environment(name, settings), "evaluate", args.out / f"{stem}-{policy}", args.fresh)
        runs = (read_run(args.out / f"{stem}-{policy}") for policy in ("oracle", "nop"))
        rows.append(oracle_row(stem, *runs))
    if (console := new_console()).is_terminal:
        console.print(on_terminal(rows))
    else:
        print(table(rows))
    return int(any(row.failed for row in rows))
