"""`hermes-rl serve CONFIG [--env.key value ...]`."""

from __future__ import annotations

import argparse

from environments.apps.cli.process import add_config, launch
from environments.config.flags import add_workers

EXAMPLE = "hermes-rl serve terminal_tasks_vllm --env.rollout_server_url http://127.0.0.1:8000"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_workers(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until the trainer is done or a signal comes."""
    return launch(args, "serve")
