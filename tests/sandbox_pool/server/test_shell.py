"""State between commands: what bash saves is understood exactly, and what is predicted is what it saves."""

from __future__ import annotations

import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_pool.server.slots import shell

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True, alphabet=st.characters(max_codepoint=127))
VALUES = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=30)
RESERVED = {
    "_",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "PATH",
    "IFS",
    "PS4",
    "BASH_ENV",
    "ENV",
    "SHELLOPTS",
    "BASHOPTS",
    "UID",
    "EUID",
    "PPID",
    "RANDOM",
    "LANG",
}


def saved_by_bash(env: dict[str, str]) -> bytes:
    """What a shell with this environment saves."""
    script = "declare +x PWD OLDPWD SHLVL; declare -px; declare -f; alias -p"
    command = ["/bin/bash", "-c", script]
    return subprocess.run(command, env={**env, "LC_CTYPE": "C.UTF-8"}, capture_output=True, check=True).stdout


def interesting(env: dict[str, str]) -> bool:
    return not any(name in RESERVED or name.startswith(("BASH", "LC_", "COMP", "HIST")) for name in env)


@settings(max_examples=25)
@given(env=st.dictionaries(NAMES, VALUES, max_size=5).filter(interesting))
def test_a_saved_state_gives_the_environment_back(env: dict[str, str]) -> None:
    state = saved_by_bash(env)
    found, offset = shell.split_state(state)
    given_directly = {name: value.decode() for name, value in found if name != "LC_CTYPE"}
    assert given_directly.items() <= env.items()
    rest = {**dict(found), **dict(shell.split_state(state[offset:])[0])}
    assert set(env) <= set(rest) or offset < len(state)


@settings(max_examples=20)
@given(env=st.dictionaries(NAMES, st.text("abcXYZ019 /.-=:$`\"\\'~*", max_size=20), max_size=5).filter(interesting))
def test_the_first_state_is_predicted(env: dict[str, str]) -> None:
    assert shell.state_of({**env, "LC_CTYPE": "C.UTF-8"}) == saved_by_bash(env)


@settings(max_examples=20)
@given(text=VALUES)
def test_any_text_is_one_word(text: str) -> None:
    command = ["/bin/bash", "-c", f"printf %s {shell.quote(text)}"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == text.encode()


def test_variables_of_one_command_are_put_back() -> None:
    before = shell.state_of({"A": "1", "B": "2"})
    after = shell.state_of({"A": "changed", "B": "2", "C": "new", "D": "kept"}) + b"f () \n{ \n    :\n}\n"
    expected = shell.state_of({"A": "1", "B": "2", "D": "kept"}) + b"f () \n{ \n    :\n}\n"
    assert shell.restore_env(after, before, {"A": "x", "C": "y"}) == expected
    assert shell.restore_env(after, before, {}) == after


def test_what_only_bash_can_read_is_left_to_it() -> None:
    state = b'declare -x A="1"\ndeclare -ax L=([0]="x")\ndeclare -x Z="2"\nf () \n{ \n    :\n}\n'
    env, offset = shell.split_state(state)
    assert env == [("A", b"1")]
    assert state[offset:].startswith(b"declare -ax L")


def test_names_bash_cannot_hold() -> None:
    assert shell.valid_env_name("A_1")
    assert not any(shell.valid_env_name(name) for name in ("", "1A", "A-B", "A B", "A\n", "é"))
