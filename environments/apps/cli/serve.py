"""`hermes-rl serve CONFIG [--env.key value ...]`."""

from __future__ import annotations

import argparse
import sys

from environments.apps.cli.process import add_config, launch

EXAMPLE = "hermes-rl serve terminal_tasks_vllm --env.rollout_server_url http://127.0.0.1:8000"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until the trainer is done or a signal comes; exit code 1 when run-api did not come back in time."""
    from environments.atropos.api import ApiLost

    try:
        return launch(args, "serve")
    except ApiLost as error:
        sys.stderr.write(f"hermes-rl: {error}\n")
        return 1
