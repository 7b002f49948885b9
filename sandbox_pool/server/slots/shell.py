"""The bash side of a slot's session: a shell that stays, takes one command after the other, and leaves its state.

It reads commands from descriptors with fixed high numbers, which no program it starts inherits, and evaluates them
itself: variables, functions, aliases, options, jobs and traps of signals persist because the shell does. After each
command it writes its state to a memory file, from which the next shell starts when this one is gone: after `exit`,
`exec`, `set -e`, a signal, a timeout. Nothing a command prints is interpreted; only the slot's shells read the state.

A command may have redefined what this text is made of. So the first steps after a command are taken in POSIX mode,
where functions cannot stand in for `unset`, `exec`, `exit` and `set`. They remove a function named `builtin`, through
which the rest is what it is called. All of the text is parsed before the first command runs, so before any alias.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

FD_WAKE, FD_REPORT, FD_STATE, FD_SCRIPT, FD_INPUT, FD_OUT = range(240, 246)
"""Must agree with the enum in helper/slot.h."""
PIPES = 6
"""For output, from FD_OUT on. A command that leaves processes behind leaves its pipe to them."""

_START = 'eval "$__hermes"'
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def quote(text: str) -> str:
    """`text` as one word of bash."""
    return "'" + text.replace("'", "'\\''") + "'"


def start(folder: str = "") -> str:
    """Argument of `bash -c`; what it evaluates comes from the environment, so that process lists stay readable.

    Where slots share the host's processes it names the slot's folder, because nobody can read a shell's environment.
    """
    return f": {quote(folder)}; {_START}" if folder else _START


def valid_env_name(name: str) -> bool:
    """Whether bash can hold an environment variable of this name."""
    return bool(_NAME.match(name))


def login_script(env: Mapping[str, str]) -> str:
    """What a login shell does first; a profile may fail on the way and has been sourced all the same."""
    exports = "".join(f"export {name}={quote(value)}; " for name, value in env.items())
    return (
        "[ ! -r /etc/profile ] || . /etc/profile\n"
        'for __hermes_file in ~/.bash_profile ~/.bash_login ~/.profile; do [ ! -r "$__hermes_file" ] || '
        '{ . "$__hermes_file"; break; }; done; unset __hermes_file\n'
        f"{exports}true"
    )


def _join(*statements: str) -> str:
    """On one line: bash counts the lines of a command from where this text is."""
    return "; ".join(statements)


_HIDE = " ".join(f"{fd}<&-" for fd in range(FD_WAKE, FD_OUT + PIPES))
"""While a builtin with these redirections runs, bash keeps the descriptors where no program inherits them."""
_SEE = "__hermes=$?:$SHELLOPTS:$BASHOPTS:"
# Options that hold for the command that sets them: a later one should not end, or be shown, because of it.
_CLOSE = "POSIXLY_CORRECT=1; unset -f builtin || exit; set +evx; unset POSIXLY_CORRECT"
# POSIX mode changes these on its way in or out.
_OPEN = _join(
    "[[ $__hermes == *:interactive_comments:* ]] || builtin shopt -u interactive_comments",
    "[[ $__hermes == *:sourcepath:* ]] || builtin shopt -u sourcepath",
    "[[ $__hermes == *:inherit_errexit:* ]] || builtin shopt -u inherit_errexit",
    "[[ $__hermes == *:shift_verbose:* ]] || builtin shopt -u shift_verbose",
    "[[ $__hermes != *:expand_aliases:* ]] || builtin shopt -s expand_aliases",
    "[[ $__hermes != *:posix:* ]] || POSIXLY_CORRECT=1",
    "builtin unset __hermes",
)
_STATE = f"/proc/self/fd/{FD_STATE}"
# A byte on a pipe says that a script is there; bash reads pipes byte by byte, so the script itself is in a file. Its
# parts end with NUL: what to do first, the command, the word for its report.
_WAIT = f"builtin read -r -u {FD_WAKE}"
_READ = f"builtin read -r -d '' -u {FD_SCRIPT}"


# Bash writes each line of a builtin's output by itself, so all options are one line: those that are on. Whoever reads
# it switches off what is not among them.
_OPTIONS = _join(
    'printf \'%s%s:%s%s\\n\' "__hermes_on=:" "$SHELLOPTS" "$BASHOPTS:; "'
    " 'for REPLY in ${SHELLOPTS//:/ }; do [[ $__hermes_on == *:$REPLY:* ]] || set +o $REPLY; done; "
    "for REPLY in ${BASHOPTS//:/ }; do [[ $__hermes_on == *:$REPLY:* ]] || shopt -u $REPLY; done; "
    "for REPLY in ${__hermes_on//:/ }; do shopt -s $REPLY || set -o $REPLY; done; unset __hermes_on'",
)


_PARAMETERS = _join("builtin printf 'set --'", "builtin printf ' %q' \"$@\"", "builtin printf '\\n'")
# What `popd` goes back to, without the top, which is the working directory. REPLY holds the word for the report here.
_DIRECTORIES = _join(
    "builtin printf '__hermes_on=('",
    "builtin printf ' %q' \"${DIRSTACK[@]:1}\"",
    "builtin printf '%s\\n' '); for ((REPLY = ${#__hermes_on[@]}; REPLY--; ))"
    ' do pushd -n "${__hermes_on[REPLY]}"; done; unset __hermes_on\'',
)


def _write_state() -> str:
    # In this order it can be read back: no alias works and no function is there yet when something else is set.
    steps = (
        "builtin shopt -u expand_aliases",
        f"builtin {_OPTIONS}",
        f"[[ -z ${{DIRSTACK[1]-}} ]] || {{ {_DIRECTORIES}; }}",
        "builtin declare -p",
        "builtin umask -p",
        "builtin trap -p",
        f"[[ $# == 0 ]] || {{ {_PARAMETERS}; }}",
        "builtin alias -p",
        "builtin declare -f",
        "builtin printf '%s\\n' '#end'",
    )
    return f"{{ {_join(*steps)}; }} >|{_STATE}"


def _report(status: str) -> str:
    """The word that only this command was given, its status, its directory."""
    return f'builtin printf \'%s\\0%s\\0%s\\0\' "$REPLY" {status} "${{PWD-}}" >&{FD_REPORT}'


def _save_and_end() -> str:
    """For a shell that is about to end: its state first, its own end is the result."""
    return _join(_READ, _write_state(), _report("exit"))


_STATUS = '"${__hermes%%:*}"'
_QUIET = ">/dev/null 2>&1"
# For a command that ends the shell itself; one with a trap of its own takes care of its end.
_LEFT = f"{{ {_SEE}; {_CLOSE}; {_save_and_end()}; }} {_QUIET}"
_FORGET_TRAPS = "builtin trap - DEBUG ERR RETURN EXIT"


def _boot(workdir: str) -> str:
    """Restore the state, if there is one."""
    restore = _join(f"builtin cd -- {quote(workdir)}", "OLDPWD=$PWD", f". {_STATE}", _CLOSE, _FORGET_TRAPS)
    # Aliases are for commands, not for what is restored; `_OPEN` finds in `_SEE` that they are wanted.
    begin = _join("unset __hermes", "shopt -s expand_aliases", _SEE, "shopt -u expand_aliases")
    return _join(begin, f"{{ {restore}; }} {_QUIET}")


def _go_back(workdir: str) -> str:
    """The directory may have been removed or replaced since the last command."""
    move = f'builtin cd -- "${{PWD-}}" || builtin cd -- {quote(workdir)} || builtin cd /'
    return f"[[ ${{PWD-}} -ef . ]] || {{ REPLY=${{OLDPWD-}}; {move}; OLDPWD=$REPLY; }}"


@functools.lru_cache(maxsize=64)
def session_boot(workdir: str) -> str:
    """A shell that takes commands until it is told no more."""
    leave = _join(_save_and_end(), f"REPLY={_STATUS}", _OPEN, "builtin exit $REPLY")
    finished = _join(
        _SEE,
        _CLOSE,
        f"builtin trap -p EXIT >|{_STATE}",
        f"builtin read -r -d '' <{_STATE}",
        # A trap of the command's own for its end is run by ending this shell.
        f"if [[ $REPLY && $REPLY != *__hermes* ]]; then {leave}; fi",
        _FORGET_TRAPS,
        # The result need not wait for the state: the shell takes no other command before it is written.
        f"{{ {_READ}; {_report(_STATUS)}; }} || builtin exit {_STATUS}",
        _write_state(),
        _report("saved"),
    )
    one = _join(
        'POSIXLY_CORRECT=1; builtin eval "$REPLY"; unset POSIXLY_CORRECT',
        f"{{ builtin trap {quote(_LEFT)} EXIT; {_go_back(workdir)}; {_READ}; {_OPEN}; }} 2>/dev/null",
        f'builtin eval "$REPLY" {_HIDE}',
        f"{{ {finished}; }} {_QUIET}",
    )
    # With `set -n`, or a DEBUG trap that skips all commands, this does nothing and gives 0: then the loop must end.
    taken = f"if [[ ${{__hermes-}} ]] && {_WAIT} && {_READ}; then [[ '' ]]; fi"
    return _join(_boot(workdir), f"until {taken}; do {one}; done")


@functools.lru_cache(maxsize=64)
def process_boot(workdir: str) -> str:
    """A background process: it starts from the slot's state and leaves none."""
    return _join(
        _boot(workdir),
        f"{_WAIT} || builtin exit",
        f"{{ {_READ}; {_go_back(workdir)}; {_READ}; }} 2>/dev/null",
        f"POSIXLY_CORRECT=1; exec {_HIDE}; unset POSIXLY_CORRECT",
        f"{{ {_OPEN}; }} 2>/dev/null",
        'builtin eval "$REPLY"',
    )
