"""`hermes-rl evaluate CONFIG [--env.key value ...]`."""

from __future__ import annotations

import argparse

from environments.cli.errors import UsageError

HELP = "roll out the evaluation items and sum up: mean, pass@k, what infrastructure cost"
EXAMPLE = "hermes-rl evaluate terminal_tasks --env.eval_items 16"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    from pathlib import Path

    parser.add_argument("config", metavar="CONFIG", help="YAML file, or the name of a shipped config")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run directory (default runs/NAME)")
    parser.add_argument("--fresh", action="store_true", help="start over instead of resuming")


def run(args: argparse.Namespace) -> int:
    """Run to the end, or until a signal; the same command goes on from there."""
    from environments.config import ConfigError, find_config

    try:
        find_config(args.config)
        from environments.launch import configure_logging, load_environment, run_verb
        from environments.runs.store import RunDiffers, RunInUse

        configure_logging()
        try:
            return run_verb(load_environment(args.config, args.settings), "evaluate", args.out, args.fresh)
        except (RunDiffers, RunInUse) as error:
            raise UsageError(str(error)) from error
    except ConfigError as error:
        raise UsageError(str(error)) from error
