"""Hints for programs that need a person; silence for the rest."""

import pytest

from agent_loop.tools.shell.terminal import interactive_hint, sudo_hint


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("vim a.py", "vim needs a terminal"),
        ("cd x && nano y", "nano needs"),
        ("sudo less /var/log/x", "less needs"),
        ("EDITOR=x top", "top needs"),
        ("python", "waits for input"),
        ("/usr/bin/python3", "waits for input"),
        ("git rebase -i HEAD~3", "opens an editor"),
        ("cat a | less", "less needs"),
    ],
)
def test_interactive_programs_get_advice(command, said):
    assert said in interactive_hint(command)


@pytest.mark.parametrize(
    "command",
    [
        "python a.py",
        "python -c 'x'",
        "echo 1 | python",
        "python < f",
        "ls -la",
        "git commit -m x",
        "echo vim",
        "grep top x",
        "",
    ],
)
def test_ordinary_commands_get_none(command):
    assert interactive_hint(command) is None


@pytest.mark.parametrize(
    "output",
    [
        "sudo: a terminal is required to read the password; either use ...",
        "sudo: a password is required",
        "bash: line 1: sudo: command not found",
        'sudo: The "no new privileges" flag is set, which prevents sudo from running as root.',
    ],
)
def test_sudo_that_cannot_work_is_explained(output):
    assert "without sudo" in sudo_hint("sudo apt install x", output)


def test_no_sudo_no_hint():
    assert sudo_hint("apt install x", "permission denied") is None
    assert sudo_hint("sudo true", "other trouble") is None
