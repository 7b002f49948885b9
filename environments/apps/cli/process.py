"""`hermes-rl process CONFIG [--env.key value ...]`."""

from __future__ import annotations

import argparse

from environments.apps.cli.launching import add_config, add_run_directory, launch

HELP = "roll out a number of groups into a file, resuming where an earlier start stopped"
EXAMPLE = "hermes-rl process terminal_tasks --env.total_steps 4 --env.group_size 4"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_config(parser)
    add_run_directory(parser)


def run(args: argparse.Namespace) -> int:
    """Run to the end, or until a signal; the same command goes on from there."""
    return launch(args, "process")
