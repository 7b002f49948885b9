"""`hermes-rl evaluate CONFIG [--env.key value ...]`."""

from __future__ import annotations

import argparse

from environments.cli.launching import add_config, add_run_directory, launch

HELP = "roll out the evaluation items and sum up: mean, pass@k, what infrastructure cost"
EXAMPLE = "hermes-rl evaluate terminal_tasks --env.eval_items 16"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_config(parser)
    add_run_directory(parser)


def run(args: argparse.Namespace) -> int:
    """Run to the end, or until a signal; the same command goes on from there."""
    return launch(args, "evaluate")
