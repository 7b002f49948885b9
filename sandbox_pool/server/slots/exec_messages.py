"""What a keeper is asked to run, and how its answer reads: for the server, and for a client that has a line to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..faults import SlotError
from . import shell
from .channel import Fields, Message

ALIVE_MS = 10_000
"""How often a running command says so, unless asked otherwise."""
KEEPER_GRACE_S = 3.0
"""A keeper that has not ended its command so long after it should have is killed with it."""
MAX_PATH = 4096
"""No `cd` can go to a longer one."""


def run_fields(request: Mapping[str, Any], log: str) -> list[tuple[str, Any]]:
    """An exec request in the keeper's words."""
    fields: list[tuple[str, Any]] = [
        ("timeout_ms", int(request.get("timeout_ms") or 0)),
        ("max_chars", int(request["max_chars"])),
        ("log", log),
        ("alive_ms", int(request.get("alive_ms") or ALIVE_MS)),
    ]
    if not request.get("merge", True):
        fields.append(("separate", 1))
    return fields + surroundings(request)


def surroundings(request: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The directory and the variables of one command alone."""
    env = check_env(request.get("env"))
    fields: list[tuple[str, Any]] = [("set", f"{name}={value}") for name, value in env.items()]
    if request.get("cwd") is not None:
        fields.append(("cwd", request["cwd"]))
    return fields


def check_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """Variables for one command; a name bash cannot hold is the caller's mistake."""
    for name in env or {}:
        if not shell.valid_env_name(name):
            raise SlotError("refused", f"not a name for an environment variable: {name!r}")
    return dict(env or {})


def run_message(command: bytes, fields: Fields, stdin: bytes | None) -> tuple[Fields, bytes]:
    """Fields and raw bytes of a `run`."""
    if b"\0" in command:
        raise SlotError("refused", "a command cannot hold a NUL character")
    if stdin is None:
        return fields, command
    return [*fields, ("stdin", 1), ("command", len(command))], command + stdin


def begun(message: Message) -> bool:
    """Whether the shell took the command; one that ended before has run nothing of it."""
    return bool(message.number("begun", 1) or message.number("timed_out") or message.number("killed"))


def exit_code(status: int, timed_out: bool) -> tuple[int, int | None]:
    """Exit code as bash gives it, and the signal when one ended the shell itself."""
    if timed_out:
        return 124, None
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return 128 + number, number
    return os.WEXITSTATUS(status), None


def path_text(path: bytes, otherwise: str) -> str:
    """A directory as a keeper tells it."""
    return path.decode("utf-8", "surrogateescape") if len(path) <= MAX_PATH else otherwise


def path_for_wire(path: str) -> str:
    """The same for a frame: JSON cannot hold a name that is not UTF-8."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class ExecOutcome:
    """The end of a command: the answer to its request, and where the session is."""

    def __init__(self, message: Message, request: Mapping[str, Any], log: str, *, cwd: str, workdir: str) -> None:
        facts, out, err, directory = _split_exit(message, int(request["max_chars"]), log)
        self.cwd = path_text(directory, workdir) if directory else cwd
        limit_us = int(request.get("timeout_ms") or 0) * 1000
        timed_out = bool(message.number("timed_out") or (limit_us and message.number("us") >= limit_us))
        code, signal_number = exit_code(message.number("status"), timed_out)
        encoded = out.encode("utf-8", "replace")
        self.body = encoded + err.encode("utf-8", "replace")
        self.reply = {
            "code": code,
            "signal": signal_number,
            "timed_out": timed_out,
            "cwd": path_for_wire(self.cwd),
            "us": message.number("us"),
            "out": len(encoded),
            "cut": facts,
        }


def shown(head: bytes, tail: bytes, truncated: bool, chars: int, max_chars: int, log: str) -> tuple[str, int]:
    """The text to show (40 % head, 60 % tail) and how many characters it leaves out."""
    text = head.decode("utf-8", "replace")
    if not truncated:
        return text, 0
    head_chars = max_chars * 2 // 5
    tail_chars = max_chars - head_chars
    omitted = chars - max_chars
    ending = tail.decode("utf-8", "replace")
    note = f"\n... [{omitted} of {chars} characters omitted; all of it is in {log}] ...\n"
    return text[:head_chars] + note + (ending[-tail_chars:] if tail_chars else ""), omitted


def _split_exit(message: Message, max_chars: int, log: str) -> tuple[dict[str, Any], str, str, bytes]:
    """Truncation facts, stdout, stderr and the directory out of a keeper's exit message."""
    position = 0
    texts = []
    facts: dict[str, Any] = {}
    for name, path in (("out", log), ("err", f"{log}.stderr")):
        head_size, tail_size = message.number(f"{name}_head"), message.number(f"{name}_tail", -1)
        chars = message.number(f"{name}_chars")
        head = message.raw[position : position + head_size]
        position += head_size
        tail = message.raw[position : position + max(tail_size, 0)]
        position += max(tail_size, 0)
        text, omitted = shown(head, tail, tail_size >= 0, chars, max_chars, path)
        texts.append(text)
        if tail_size >= 0:
            facts[name] = {"total": chars, "omitted": omitted, "log": path}
    return facts, texts[0], texts[1], message.raw[position:]
