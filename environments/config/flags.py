"""Dotted flags: `--env.group_size 8`, `--pool.min_hosts=-1`, `--env.toolsets '[terminal, file]'`.

A value is read as YAML, so numbers (negative ones too), lists and mappings work as they do in a file. A flag without a
value means true.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from environments.errors import ConfigError

if TYPE_CHECKING:
    from environments.config.yaml_file import KeyPath

_FLAG = re.compile(r"--(?P<path>[A-Za-z_][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL)
_DOTTED = re.compile(r"--[A-Za-z_][\w-]*(\.[\w-]+)+(=.*)?", re.DOTALL)


@dataclass(frozen=True)
class Flag:
    """One setting from the command line."""

    path: KeyPath
    value: Any
    text: str | None
    """The value as typed; None when the flag stood alone."""
    name: str


def split_settings(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take the dotted flags and their values out of a command line: argparse cannot know them."""
    words: list[str] = []
    settings: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not _DOTTED.fullmatch(word):
            words.append(word)
            continue
        settings.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            settings.append(rest.pop(0))
    return words, settings


def parse_flags(words: Sequence[str]) -> list[Flag]:
    """Flags in the order given; later ones win."""
    flags: list[Flag] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        match = _FLAG.fullmatch(word)
        if match is None:
            raise ConfigError(f"unexpected word {word!r}: settings are given as --section.key VALUE")
        text = match["value"]
        if text is None and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        name = f"--{match['path']}"
        flags.append(Flag(_key_path(match["path"]), _read_value(text), text, name))
    return flags


def apply_flags(data: dict[str, Any], flags: Sequence[Flag]) -> None:
    """Set each flag's value in nested data, making the mappings on the way."""
    for flag in flags:
        *parents, last = flag.path
        target: Any = data
        for part in parents:
            target = _descend(target, part, flag)
        _set(target, last, flag.value, flag)


def _key_path(dotted: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part.replace("-", "_") for part in dotted.split("."))


def _read_value(text: str | None) -> Any:
    if text is None:
        return True
    import yaml  # here, because every start of `hermes-rl` imports this module and few have flags

    try:
        return yaml.safe_load(text) if text.strip() else text
    except (yaml.YAMLError, ValueError):
        # Text that is not YAML (`@x`, `a: b: c`, `2001-99-99`) may still be a string; the type of the field decides.
        return text


def _descend(target: Any, part: str | int, flag: Flag) -> Any:
    if isinstance(target, list):
        return target[_index(target, part, flag)]
    if not isinstance(target, dict):
        raise ConfigError(f"{flag.name}: {part!r} has no keys below it")
    if target.get(str(part)) is None:
        target[str(part)] = {}
    return target[str(part)]


def _set(target: Any, part: str | int, value: Any, flag: Flag) -> None:
    if isinstance(target, list):
        target[_index(target, part, flag)] = value
    elif isinstance(target, dict):
        target[str(part)] = value
    else:
        raise ConfigError(f"{flag.name}: {part!r} cannot be set below a single value")


def _index(target: list[Any], part: str | int, flag: Flag) -> int:
    if not isinstance(part, int):
        raise ConfigError(f"{flag.name}: {part!r} is not a position in a list of {len(target)}")
    if part >= len(target):
        raise ConfigError(f"{flag.name}: the list has {len(target)} entries, so its last position is {len(target) - 1}")
    return part


def add_workers(parser: argparse.ArgumentParser) -> None:
    """The flag of `serve`."""
    parser.add_argument(
        "--workers", type=_workers, default=0, metavar="N", help="serve with N processes that share pool and run folder"
    )


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes: give 1 or more")
    return int(text)
