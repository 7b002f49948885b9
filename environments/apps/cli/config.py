"""`hermes-rl config CONFIG [--env.key value ...]`: the settings in force, and where each comes from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from environments.apps.cli.process import add_config

if TYPE_CHECKING:
    from environments.config.loader import Origins

EXAMPLE = "hermes-rl config terminal_tasks --env.group_size 8"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--set", action="store_true", help="only what the file, a flag or a variable sets")
    parser.add_argument("--json", action="store_true", help="one JSON object: setting -> value and origin")


def run(args: argparse.Namespace) -> int:
    """Print each setting on a line of its own; secrets are masked."""
    from environments.config.yaml_file import find_config

    find_config(args.config)  # a wrong name is answered before anything heavy is imported
    from environments.config.loader import Origins, masked
    from environments.config.settings import RunConfig
    from environments.launch import load_run

    _, config = load_run(args.config, args.settings, None, RunConfig)
    rows = list(_rows(masked(config), Origins(args.config, args.settings, os.environ)))
    rows = [row for row in rows if row[0] != "env.limits.max_turns"]  # `max_agent_turns` is this limit, and is set
    if args.set:
        rows = [row for row in rows if row[2] != "default"]
    if args.json:
        print(
            json.dumps({name: {"value": value, "from": origin} for name, value, origin in rows}, default=str, indent=2)
        )
        return 0
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, value, origin in rows:
        print(f"{name:<{width}}  {json.dumps(value, default=str, ensure_ascii=False)}  ({origin})")
    return 0


def _rows(data: Mapping[str, Any], origins: Origins, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str, Any, str]]:
    for key, value in data.items():
        path = (*at, key)
        if isinstance(value, Mapping) and value:
            yield from _rows(value, origins, path)
        else:
            yield ".".join(map(str, path)), value, origins.of(path)
