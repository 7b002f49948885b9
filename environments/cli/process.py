"""`hermes-rl process CONFIG [--env.key value ...]`."""

from __future__ import annotations

import argparse

from environments.cli.errors import UsageError

HELP = "roll out a number of groups into a file, resuming where an earlier start stopped"
EXAMPLE = "hermes-rl process terminal_tasks --env.total_steps 4 --env.group_size 4"
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
            return run_verb(load_environment(args.config, args.settings), "process", args.out, args.fresh)
        except (RunDiffers, RunInUse) as error:
            raise UsageError(str(error)) from error
    except ConfigError as error:
        raise UsageError(str(error)) from error
