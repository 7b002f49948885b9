"""`hermes-rl validate CONFIG`: are the items sound?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from environments.apps.cli.process import add_config, add_run_directory
from environments.consoles import PIPE_WIDTH, new_console
from environments.errors import at_least

if TYPE_CHECKING:
    from environments.runs.validation import Validation

EXAMPLE = "hermes-rl validate terminal_tasks --limit 8"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_run_directory(parser)
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="which items (default: train)")
    parser.add_argument("--limit", type=at_least(1), default=64, metavar="N", help="at most so many items (64)")
    parser.add_argument(
        "--repeats", type=at_least(2), default=3, metavar="K", help="plays of a solution, verdicts of a snapshot (3)"
    )
    parser.add_argument("--quarantine", type=Path, metavar="FILE", help="where the list goes (DIR/quarantine.json)")


def run(args: argparse.Namespace) -> int:
    """Play everything, print the table; 1 when an item is accused."""

    from environments.config.yaml_file import find_config

    find_config(args.config)

    from agent_loop import own_process
    from environments.launch import configure_logging
    from environments.runs.validation import render, store

    configure_logging()
    found, folder = own_process.run(_validate(args))
    listed = store(found, folder, args.quarantine)
    new_console(pipe_width=PIPE_WIDTH, emoji=False).print(render(found))
    print(f"{len(found.accused)} items to leave out: {listed} (use it with --env.quarantine {listed})")
    return 1 if found.accused else 0


async def _validate(args: argparse.Namespace) -> tuple[Validation, Path]:
    from environments.base import HermesAgentBaseEnv
    from environments.config.settings import RunConfig
    from environments.errors import writing
    from environments.launch import load_run
    from environments.runs.batch import identity
    from environments.runs.progress import progress_for
    from environments.runs.store import keep_config, locked
    from environments.runs.validation import Validator, shared_pool

    kind, config = load_run(args.config, args.settings, None, RunConfig)
    settings = config.env.model_copy(update={"quarantine": None})
    folder = args.out or Path("runs") / f"{kind.name or kind.__name__}-validate"
    first = kind(settings.model_copy(deep=True), config.servers())
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        locked(folder / ".lock")
    path = folder / "observations.jsonl"
    if args.fresh:
        path.unlink(missing_ok=True)
    keep_config(folder / "config.json", {"split": args.split, **identity(first)}, check=path.exists())
    async with shared_pool(first) as pool:

        def make_env() -> HermesAgentBaseEnv:
            return kind(settings.model_copy(deep=True), config.servers(), pool=pool)

        validator = Validator(make_env, path, args.repeats, args.limit, args.split, settings.groups_at_once)
        with progress_for() as progress:
            return await validator.run(progress), folder
