"""What `serve`, `process` and `evaluate` share: a config becomes an environment, and the environment runs one verb."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_config(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Declare the config that every one of them takes."""
    count = None if required else "?"
    parser.add_argument("config", metavar="CONFIG", nargs=count, help="YAML file, or the name of a shipped config")


def add_run_directory(parser: argparse.ArgumentParser) -> None:
    """Declare where a run is stored."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="run directory (default runs/NAME)")
    parser.add_argument("--fresh", action="store_true", help="start over instead of resuming")


def launch(args: argparse.Namespace, verb: str) -> int:
    """Run the verb to its end, or until a signal."""
    from environments.config.yaml_file import find_config

    find_config(args.config)  # a wrong name is answered before anything heavy is imported
    from environments.launch import configure_logging, load_environment, run_verb

    configure_logging()
    env = load_environment(args.config, args.settings)
    return run_verb(env, verb, getattr(args, "out", None), getattr(args, "fresh", False))
