"""The session's shell: what it saves is what the next one has."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox_pool.server.slots import shell
from support.slot_server import Server

NAMES = st.from_regex(r"[a-z][A-Za-z0-9_]{0,8}", fullmatch=True, alphabet=st.characters(max_codepoint=127))
VALUES = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=30)


@settings(max_examples=20)
@given(text=VALUES)
def test_any_text_is_one_word(text: str) -> None:
    command = ["/bin/bash", "-c", f"printf %s {shell.quote(text)}"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == text.encode()


@pytest.mark.asyncio(loop_scope="module")
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(variables=st.dictionaries(NAMES, VALUES, min_size=1, max_size=4))
async def test_any_variable_is_there_in_the_next_shell(server: Server, variables: dict[str, str]) -> None:
    async with server.lease() as sandbox:
        await sandbox.exec("; ".join(f"{name}={shell.quote(value)}" for name, value in variables.items()) + "; exit")
        found = await sandbox.exec("; ".join(f'printf "%s\\0" "${name}"' for name in variables))
        assert found.output == "".join(f"{value}\0" for value in variables.values())


def test_names_bash_cannot_hold() -> None:
    assert shell.valid_env_name("A_1")
    assert not any(shell.valid_env_name(name) for name in ("", "1A", "A-B", "A B", "A\n", "é"))
