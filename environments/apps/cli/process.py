"""`hermes-rl process CONFIG [--env.key value ...]`; and what other verbs share with it."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLE = "hermes-rl process terminal_tasks --env.total_steps 4 --env.group_size 4"
TAKES_SETTINGS = True
LEARN_CONFIG = "learn/smollm2"
"""What `learn` trains, and `evaluate --adapter` then evaluates, by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_run_directory(parser)


def run(args: argparse.Namespace) -> int:
    """Run to the end, or until a signal; the same command goes on from there."""
    return launch(args, "process")


def add_config(parser: argparse.ArgumentParser, required: bool = True) -> None:
    count = None if required else "?"
    parser.add_argument("config", metavar="CONFIG", nargs=count, help="YAML file, or the name of a shipped config")


def add_run_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="DIR", help="run directory (default runs/NAME)")
    parser.add_argument("--fresh", action="store_true", help="start over instead of resuming")


def launch(args: argparse.Namespace, verb: str) -> int:
    """Build the environment of a config and run one verb of it, to its end or until a signal."""
    from environments.config.yaml_file import find_config

    find_config(args.config)  # a wrong name is answered before anything heavy is imported
    from environments.launch import configure_logging, load_environment, run_verb

    configure_logging()
    env = load_environment(args.config, args.settings)
    out, fresh = getattr(args, "out", None), getattr(args, "fresh", False)
    return run_verb(env, verb, out, fresh, getattr(args, "workers", 0))
