"""`hermes-rl replay RUN ROLLOUT`: a recorded rollout once more, without model and slots."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

EXAMPLE = "hermes-rl replay runs/terminal_tasks terminal_tasks-0-000000/0"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run made with --env.cassettes true, or one cassette")
    parser.add_argument("rollout", metavar="ROLLOUT", nargs="?", help="the id of a rollout; none with a cassette")


def run(args: argparse.Namespace) -> int:
    """Replay; exit code 1 and the first difference when it goes another way than it was recorded."""
    from agent_loop import own_process
    from environments.errors import UsageError
    from environments.launch import configure_logging
    from environments.printable import printable
    from environments.runs.replaying import find_cassette, replay

    if args.run.is_file() and args.rollout is not None:
        raise UsageError(f"{args.run} is a cassette, which holds one rollout: name no other")
    path = find_cassette(args.run, args.rollout)
    configure_logging()
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_news)
    replayed = own_process.run(replay(path, settings=args.settings))
    print(printable(str(replayed)))
    return 0 if replayed.equal else 1


def _is_news(record: logging.LogRecord) -> bool:
    """Not the traceback of a replay that goes another way: what is printed says where."""
    from agent_loop.records.tape import Diverged

    return record.exc_info is None or not isinstance(record.exc_info[1], Diverged)
