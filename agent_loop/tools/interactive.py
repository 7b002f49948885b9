"""Hints about commands that wait for somebody at a terminal. They only add text; they never stop a command."""

from __future__ import annotations

import re

_PROGRAMS = {
    "editor": ("vim", "vi", "nvim", "nano", "emacs", "pico"),
    "pager": ("less", "more", "man"),
    "monitor": ("top", "htop", "watch", "btop"),
    "session": ("ssh", "telnet", "ftp", "sftp", "tmux", "screen"),
}
_KINDS = {program: kind for kind, programs in _PROGRAMS.items() for program in programs}
_ADVICE = {
    "editor": "Edit files with write_file or patch, or with sed in the terminal.",
    "pager": "Use cat, head or tail instead, or pipe into cat.",
    "monitor": "Use a one-shot form instead, e.g. top -b -n 1 or ps aux.",
    "session": "Give the remote command on the command line, or start it with background=true and pty=true.",
}
_INTERPRETERS = ("python", "python3", "node", "ipython", "psql", "mysql", "sqlite3", "irb", "gdb")
_SUDO_TROUBLE = re.compile(
    r"^sudo: .*(password|terminal is required|no tty|no new privileges|effective uid|setuid|unable to)"
    r"|^.*: sudo: command not found",
    re.MULTILINE,
)


def interactive_hint(command: str) -> str | None:
    """Advice when the command starts a program that wants a person at a terminal."""
    for part in re.split(r"&&|\|\||[;|&\n]", command):
        words = [word for word in part.split() if not re.fullmatch(r"\w+=\S*", word)]
        if words[:1] == ["sudo"]:
            del words[0]
        if words and (hint := _program_hint(words, piped="|" in command)):
            return hint
    return None


def _program_hint(words: list[str], *, piped: bool) -> str | None:
    program = words[0].rsplit("/", 1)[-1]
    if (kind := _KINDS.get(program)) is not None:
        return f"{program} needs a terminal. {_ADVICE[kind]}"
    if program in _INTERPRETERS and len(words) == 1 and not piped:
        return f"{program} without arguments waits for input. Pass the code (-c) or a file, or use pty=true."
    if program == "git" and words[1:2] == ["rebase"] and ("-i" in words or "--interactive" in words):
        return "git rebase -i opens an editor. Set GIT_SEQUENCE_EDITOR, or use non-interactive commands."
    return None


def sudo_hint(command: str, output: str) -> str | None:
    """A clear text when sudo could not work: there is no password and nobody to type one."""
    if "sudo" in command and _SUDO_TROUBLE.search(output):
        return "sudo does not work here: there is no password to give. Run the command without sudo."
    return None
