"""The bash side of a command: how a waiting shell receives it, and how its state survives it.

A shell is started before its command is known, restores the slot's state from a memory file, and waits. The command
arrives as a script that ends by saving the state for the next shell. All of this uses descriptors with fixed high
numbers that stdout and stderr know nothing of, so nothing printed can pass for status, directory or state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

FD_WAKE, FD_STATE, FD_SCRIPT = 200, 201, 202
"""Must agree with the enum in helper/slot.h."""

START = 'eval "$__hermes"'
"""Argument of `bash -c`; what it evaluates comes from the environment, so that process lists stay readable."""
# PWD and OLDPWD go first and apart: they change with every cd, and no waiting shell is thrown away for that.
_SAVE = (
    '{ builtin printf \'%s\\0%s\\0\' "$PWD" "${OLDPWD-}"; declare +x PWD OLDPWD SHLVL; declare -px; declare -f;'
    f" alias -p; }} 2>/dev/null >/proc/self/fd/{FD_STATE}"
)
# While the command runs, bash keeps the state's descriptor where no program inherits it, and puts it back at the end.
# A byte on a pipe says that the script is there; bash reads pipes byte by byte, so the script itself is in a file.
_RECEIVE = (
    f"unset __hermes; shopt -s expand_aliases; . /proc/self/fd/{FD_STATE}; read -r -u {FD_WAKE} || exit;"
    f' unset REPLY; . /proc/self/fd/{FD_SCRIPT}; exec {FD_WAKE}<&- {FD_SCRIPT}<&-; eval "unset __hermes; $__hermes";'
    f' eval "unset __hermes_command; $__hermes_command" {FD_STATE}<&-'
)
# After a plain end the state is saved here, so that a command may have an EXIT trap of its own.
EXEC_BOOT = f"{_RECEIVE}; __hermes=$?; {_SAVE}; __hermes_saved=1; exit $__hermes"
SPAWN_BOOT = _RECEIVE
_TRAP = f"[[ ${{__hermes_saved-}} ]] || {{ {_SAVE}; }}"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def quote(text: str) -> str:
    """`text` as one word of bash."""
    return "'" + text.replace("'", "'\\''") + "'"


def valid_env_name(name: str) -> bool:
    """Whether bash can hold an environment variable of this name."""
    return bool(_NAME.match(name))


def _change_directory(cwd: str | None, current: str, previous: str, workdir: str) -> str:
    if cwd is not None:  # asked for: not being able to go there is the command's failure
        move = f"cd -- {quote(current)} 2>/dev/null; cd -- {quote(cwd)} || exit 126"
    else:  # carried over: the last command may have removed it, and the next one must still be able to run
        move = f"cd -- {quote(current)} 2>/dev/null || cd -- {quote(workdir)} 2>/dev/null || cd /"
    return f"{move}; OLDPWD={quote(previous)}"


def _exports(env: Mapping[str, str]) -> str:
    return "".join(f"export {name}={quote(value)}; " for name, value in env.items())


def login_script(env: Mapping[str, str]) -> str:
    """What a login shell does first; a profile may fail on the way and has been sourced all the same."""
    return (
        "[ ! -r /etc/profile ] || . /etc/profile\n"
        'for __hermes_file in ~/.bash_profile ~/.bash_login ~/.profile; do [ ! -r "$__hermes_file" ] || '
        '{ . "$__hermes_file"; break; }; done; unset __hermes_file\n'
        f"{_exports(env)}true"
    )


def exec_script(
    command: str, *, cwd: str | None, current: str, previous: str, workdir: str, env: Mapping[str, str]
) -> bytes:
    """A command whose state is saved at its end, also when it calls exit."""
    prelude = f"{_change_directory(cwd, current, previous, workdir)}; {_exports(env)}trap {quote(_TRAP)} EXIT"
    return _script(prelude, command)


def spawn_script(
    command: str, *, cwd: str | None, current: str, previous: str, workdir: str, env: Mapping[str, str]
) -> bytes:
    """A background process: it starts from the slot's state and leaves none."""
    prelude = f"exec {FD_STATE}<&-; {_change_directory(cwd, current, previous, workdir)}; {_exports(env)}"
    return _script(prelude, command)


def _script(prelude: str, command: str) -> bytes:
    if "\0" in command:
        raise ValueError("a command cannot hold a NUL character")
    return f"__hermes={quote(prelude)}\n__hermes_command={quote(command)}\n".encode("utf-8", "surrogateescape")


STATE_LIMIT = 256 << 10
"""A larger state is not kept. Must agree with helper/keeper.c."""
_EXEC_LIMIT = 100 << 10
"""The kernel refuses a program whose environment holds one string of 128 KiB; bash itself can hold it."""
# A command can write into the memory file of its state, so what is read here may be hostile. Every pattern below goes
# over its input once: no two parts of it can match the same byte in two ways.
_HEAD = re.compile(rb"declare -([A-Za-z]{1,12}) ([A-Za-z_][A-Za-z0-9_]*)(?==|\n)")
_QUOTED = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_DOLLAR = rb"\$'[^'\\]*(?:\\.[^'\\]*)*'"
_ARRAY = rb'\([^"$)]*(?:(?:' + _QUOTED + rb"|" + _DOLLAR + rb')[^"$)]*)*\)'
_VALUE = re.compile(rb"(?:=(" + _QUOTED + rb"|" + _DOLLAR + rb"|" + _ARRAY + rb"))?\n", re.S)
_ESCAPED = re.compile(rb'\\([$`"\\])')


class Declaration(NamedTuple):
    """One exported variable of a saved state."""

    name: str
    text: bytes
    value: bytes | None
    """None when only bash can tell or hold it: odd quoting, an array, further attributes, no value, a very long one."""


def state_of(env: Mapping[str, str]) -> bytes:
    """The state that a shell with this environment saves, so that a first command changes nothing."""
    lines = []
    for name in sorted(env):
        value = re.sub(r'([$`"\\])', r"\\\1", env[name])
        lines.append(f'declare -x {name}="{value}"\n')
    return "".join(lines).encode("utf-8", "surrogateescape")


def split_state(state: bytes) -> tuple[list[tuple[str, bytes]], int]:
    """Variables that can be given to exec directly, and the offset from which on bash must read the state itself."""
    env: list[tuple[str, bytes]] = []
    position = 0
    for declaration in _declarations(state)[0]:
        if declaration.value is None:
            break
        env.append((declaration.name, declaration.value))
        position += len(declaration.text)
    return env, position


def restore_env(state: bytes, before: bytes, names: Mapping[str, str]) -> bytes:
    """`state` with the variables given for one command only put back to what they were in `before`."""
    if not names:
        return state
    variables, rest = _declarations(state)
    kept = [variable for variable in variables if variable.name not in names]
    kept += [variable for variable in _declarations(before)[0] if variable.name in names]
    return b"".join(variable.text for variable in sorted(kept)) + rest


def _declarations(state: bytes) -> tuple[list[Declaration], bytes]:
    """Exported variables at the head of a saved state, and the rest: functions and aliases."""
    found: list[Declaration] = []
    position = 0
    while True:
        head = _HEAD.match(state, position)
        end = _VALUE.match(state, head.end()) if head and b"x" in head[1] else None
        if head is None or end is None:
            return found, state[position:]
        text, value = state[position : end.end()], end[1]
        plain = head[1] == b"x" and value is not None and value.startswith(b'"') and len(value) < _EXEC_LIMIT
        content = _ESCAPED.sub(rb"\1", value[1:-1]) if plain and b"\0" not in value else None
        found.append(Declaration(head[2].decode(), text, content))
        position = end.end()
