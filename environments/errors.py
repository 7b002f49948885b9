"""Bad input, runs that fail, and the one place where both become a sentence and an exit code.

`run_command` is the frame around every command: `hermes-rl` and `python my_env.py` both run inside it. What a user or
their machine can cause is said in one sentence; every other exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from agent_loop.records.record import RolloutRecord

log = logging.getLogger(__name__)

BAD_INPUT, FAILED, INTERRUPTED, READER_GONE = 2, 1, 130, 141
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


class UsageError(Exception):
    """Bad input: the message names what is wrong, where, and what would be right. Exit code 2."""


class ConfigError(UsageError):
    """A setting is wrong: the message says where it stands, what is wrong and what would be right."""


class RunFailed(Exception):
    """The input was right, and the run could not be done all the same. Exit code 1."""


class RolloutLost(RunFailed):
    """Infrastructure, or the reward's own code, left less than was asked for; `records` are the lost rollouts."""

    def __init__(self, what: str, records: Sequence[RolloutRecord]) -> None:
        last = records[-1]
        super().__init__(f"{what}: {len(records)} lost, the last to {last.outcome}: {last.error or 'no reason given'}")
        self.records = list(records)


class SentenceParser(argparse.ArgumentParser):
    """argparse that raises instead of printing its usage block: every bad call gets one clear sentence."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def at_least(least: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """The `type` of a flag whose smallest value is `least`."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' if kind is int else ''}number") from None
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is too small: at least {least:g}")
        return value

    return number


def run_command(name: str, work: Callable[[], int]) -> int:
    """Run a command to its exit code; an expected fault is one sentence on stderr."""
    try:
        code = work()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output went away (`hermes-rl ... | head`): nothing to report, nobody to report it to.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # else Python tries to flush it again at its end
        return READER_GONE
    except KeyboardInterrupt:
        return _say(name, "interrupted", INTERRUPTED)
    except RunFailed as error:
        return _say(name, str(error), FAILED)
    except Exception as error:
        sentence = expected_fault(error)
        if sentence is None:
            raise
        return _say(name, sentence, BAD_INPUT)
    return code


def _say(name: str, sentence: str, code: int) -> int:
    sys.stderr.write(f"{name}: {' '.join(sentence.split())}\n")
    return code


def expected_fault(error: Exception) -> str | None:
    """What a user can read about a fault that they or their machine caused; None for a bug."""
    if isinstance(error, UsageError):
        return str(error)
    # Imported here: a command that works needs none of it, and `check_packages` comes before the first of our packages.
    import sqlite3

    from sandbox_pool.errors import SandboxError

    if isinstance(error, SandboxError):
        return f"no sandbox: {error}"
    if isinstance(error, sqlite3.DatabaseError):
        return f"the journal of the slots, pool.db in the state directory, cannot be used: {error}: move it away"
    if isinstance(error, OSError):
        return _of_the_system(error)
    return str(error) if isinstance(error, _named_faults()) else None


def _named_faults() -> tuple[type[Exception], ...]:
    """Faults that other packages raise by name."""
    from agent_loop.local_models.cpu_model.llama_server import CpuModelError
    from agent_loop.local_models.cpu_model.weights import CpuModelMissing
    from agent_loop.model.contract import ModelError
    from agent_loop.tools.tool import ToolsetError
    from environments.dataset_rows import DatasetUnavailable
    from tool_parsers import UnknownParser

    return (DatasetUnavailable, CpuModelError, CpuModelMissing, ModelError, ToolsetError, UnknownParser)


def _of_the_system(error: OSError) -> str | None:
    """A file that cannot be had, or a full disk. An OSError without a file (a socket's) may be a bug."""
    if error.errno in DISK_IS_FULL:
        return f"the disk is full{f': {error.filename}' if error.filename else ''}: free some space, or write elsewhere"
    if error.filename is None:
        return None
    return f"cannot use {os.fsdecode(error.filename)}: {error.strerror}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """UsageError that names the file when it cannot be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def warn_of_slips(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Where names of others are allowed: one that is nearly one of ours, which is missing, is a slip."""
    given, known = set(given), set(known)
    for name in sorted(known - given):
        for other in get_close_matches(name, sorted(given - known), n=1, cutoff=0.85):
            log.warning("%s: `%s` is not read: did you mean `%s`?", where, other, name)
