"""`hermes-rl serve CONFIG [--env.key value ...]`."""

from __future__ import annotations

import argparse

from environments.cli.errors import UsageError

HELP = "feed rollouts to a trainer through Atropos' run-api"
EXAMPLE = "hermes-rl serve terminal_tasks_vllm --env.rollout_server_url http://127.0.0.1:8000"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file, or the name of a shipped config")


def run(args: argparse.Namespace) -> int:
    """Serve until the trainer is done or a signal comes."""
    from environments.config import ConfigError, find_config

    try:
        find_config(args.config)
        from environments.atropos.link import ApiLost
        from environments.launch import configure_logging, load_environment, run_verb

        configure_logging()
        return run_verb(load_environment(args.config, args.settings), "serve")
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except ApiLost as error:
        print(f"hermes-rl: {error}")
        return 1
