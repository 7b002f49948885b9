"""Attacks through the shell that stays, and through its saved state: a command can write both."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.errors import SandboxError
from support.slot_server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

FORGE = (
    "trap '' EXIT; w= states=(); for f in /proc/self/fd/*; do [[ -f $f ]] || continue; "
    "{{ IFS= read -r -d '' x; read -r -d '' y; read -r -d '' z; }} <$f; "
    "if [[ $x == *exec* && $z ]]; then w=$z; else states+=($f); fi; done; [[ $w && $states ]] || exit 77; "
    'for f in "${{states[@]}}"; do {{ {what}; echo "#end"; }} >$f; done; '
    "for f in /proc/self/fd/*; do [[ -S $f ]] && printf '%s\\0exit\\0/\\0' $w >&${{f##*/}}; done; kill -9 $$"
)
"""Leaves a state of the attacker's own, and says of it all that a shell says which saved it."""


async def test_a_forged_state_does_not_stall_a_neighbour(server: Server) -> None:
    async with server.lease() as attacker, server.lease() as neighbour:
        for what in ("printf 'declare -'; head -c 400000 /dev/zero | tr '\\0' x", "head -c 200000 /dev/zero"):
            attack = asyncio.create_task(attacker.exec(FORGE.format(what=what), timeout_s=30))
            while not attack.done():
                assert (await neighbour.exec("echo here", timeout_s=3)).output == "here\n"
            assert (await neighbour.exec("echo here", timeout_s=3)).output == "here\n"
            assert (await attack).exit_code != 77


async def test_programs_inherit_nothing_but_their_three_descriptors(server: Server) -> None:
    """Also what they leave behind, and with a terminal; `exec` in the shell too."""
    async with server.lease() as agent:
        for command in (
            "ls /proc/self/fd",
            "ls /proc/self/fd & wait",
            "exec ls /proc/self/fd",
            "x=$(ls /proc/self/fd); echo $x",
        ):
            assert (await agent.exec(command, timeout_s=20)).output.split() == ["0", "1", "2", "3"], command
        process = await agent.spawn("ls /proc/self/fd")
        await process.wait()
        assert (await process.log()).data.split() == ["0", "1", "2", "3"]


async def goes_on(sandbox: Sandbox) -> bool:
    """The slot still runs commands and gives their true outcome."""
    result = await sandbox.exec("echo $((6*7)); exit 3", timeout_s=20)
    return result.output.endswith("42\n") and result.exit_code == 3


@pytest.mark.parametrize(
    "what",
    [
        "printf 'declare -x A=\"a\\0b\"\\n'",
        "head -c 1000000 /dev/zero",
        "printf 'declare -x A=\"\\377\\376\"\\n'",
        "printf 'declare -x \\377=\"1\"\\n'",
        "head -c 300000 /dev/urandom",
    ],
)
async def test_a_forged_state_does_not_lose_the_slot(server: Server, what: str) -> None:
    async with server.lease() as sandbox:
        await sandbox.exec(FORGE.format(what=what), timeout_s=20)
        assert await goes_on(sandbox)


async def test_a_folder_name_that_is_not_unicode_does_not_lose_the_slot(server: Server) -> None:
    async with server.lease() as sandbox:
        moved = await sandbox.exec('d=$(printf \'a\\377b\'); mkdir "$d" && cd "$d" && echo in > f')
        assert moved.exit_code == 0
        assert moved.cwd.endswith("/a\ufffdb")
        assert (await sandbox.exec("cat f; pwd | od -An -c | grep -o 377; cd ..")).output == "in\n377\n"
        assert await goes_on(sandbox)
        snapshot = await sandbox.snapshot(keep_state=True)
        async with server.lease(snapshot=snapshot) as fork:
            assert await goes_on(fork)
        await server.client.drop_snapshot(snapshot)


async def test_a_very_deep_folder_does_not_lose_the_slot(server: Server) -> None:
    async with server.lease() as sandbox:
        deep = "for i in $(seq 60); do mkdir $(printf 'd%.0s' {1..200}) && cd d*; done; pwd | wc -c"
        assert int((await sandbox.exec(deep, timeout_s=30)).output.split()[-1]) > 12_000
        assert await goes_on(sandbox)


async def test_a_huge_variable_does_not_end_later_commands(server: Server) -> None:
    async with server.lease() as sandbox:
        await sandbox.exec("export BIG=$(head -c 140000 /dev/zero | tr '\\0' b); export SMALL=1")
        assert (await sandbox.exec("echo ${#BIG} $SMALL")).output == "140000 1\n", "what bash can hold is held"
        refused = await sandbox.exec("/bin/true")
        assert (refused.exit_code, "Argument list too long" in refused.output) == (126, True), "as in any bash"
        assert (await sandbox.exec("unset BIG; /bin/echo $SMALL")).output == "1\n"
        assert (await sandbox.exec("/bin/echo $SMALL")).output == "1\n"


async def test_a_large_state_persists_and_is_not_kept_half(server: Server) -> None:
    async with server.lease() as sandbox:
        await sandbox.exec("mkdir d; cd d; BIG=$(head -c 300000 /dev/zero | tr '\\0' b); exit")
        assert (await sandbox.exec("basename $PWD; echo ${#BIG}")).output == "d\n300000\n"
        with pytest.raises(SandboxError, match="too many to be kept"):
            await sandbox.snapshot(keep_state=True)


HOSTILE = {
    "functions": "for f in builtin eval read printf trap unset exec exit set command declare shopt cd . source; do "
    '\\builtin eval "$f() { echo fake; }"; done',
    "fixed functions": "builtin() { echo fake; }; readonly -f builtin",
    "aliases": "for a in builtin eval exec unset if then fi until do done case '[[' '{' exit; do "
    'alias "$a=echo fake"; done',
    "fixed variables": "readonly REPLY __hermes POSIXLY_CORRECT PWD OLDPWD IFS PATH",
    "traps": "trap 'echo fake; exit 0' DEBUG ERR RETURN EXIT",
    "skipped commands": "shopt -s extdebug; trap false DEBUG",
    "closed descriptors": 'for i in {3..255}; do \\builtin eval "exec $i>&-"; done 2>/dev/null',
    "few descriptors": "ulimit -n 12",
    "every descriptor": "for f in /proc/$$/fd/*; do case $f in */[012]) ;; "
    "*) printf 'x\\0000\\0/\\0' 2>/dev/null >$f & esac; done; wait",
    "restricted": "set -r",
    "no commands": "set -n",
    "one command": "set -t",
    "posix": "set -o posix",
    "timeout of read": "TMOUT=1; readonly TMOUT",
    "separators": "IFS=0123456789abcdefx",
    "umask": "umask 777",
    "disabled builtins": "for b in unset exec exit set eval read printf trap declare builtin; do enable -n $b; done",
    "attributes": "declare -u REPLY; declare -n __hermes=PATH OLDPWD=REPLY; declare -i POSIXLY_CORRECT; declare -A PWD",
    "traces": "for i in {9..30} 241; do BASH_XTRACEFD=$i; set -x; unset BASH_XTRACEFD; done 2>/dev/null; set -x",
    "no files": "ulimit -f 0",
    "edited script": "for f in /proc/self/fd/*; do [[ -f $f ]] && echo 'exit 0' >$f; done",
    "false wakes": "for f in /proc/self/fd/*; do [[ -S $f ]] && printf '\\n\\n\\n' >&${f##*/}; done",
    "stopped shell": "kill -STOP $$",
    "killed keeper": "kill -9 $PPID",
    "stopped keeper": "kill -STOP $PPID",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_nothing_a_command_does_to_its_shell_forges_or_loses_what_follows(server: Server, name: str) -> None:
    """The exit codes and outputs of later commands are their own, and no word of ours is printed."""
    async with server.lease() as sandbox:
        await sandbox.exec("true")
        await sandbox.exec(HOSTILE[name], timeout_s=3)
        for code in (3, 0, 4):
            result = await sandbox.exec(f"\\printf %s {code}; (\\exit {code})", timeout_s=20)
            assert result.exit_code == code, (name, result)
            assert "hermes" not in result.output
            assert result.output.replace("fake\n", "") in (str(code), ""), (name, result)
        await sandbox.forget_state()
        assert await goes_on(sandbox)


FAKES = "python3() { echo faked; }; cat() { echo faked; }; alias ls='echo faked'; export PATH=/no BASH_ENV=/tmp/e; cd /"


async def test_a_fork_is_not_steered_by_the_shell_it_was_made_from(server: Server) -> None:
    async with server.lease() as agent:
        await agent.exec("echo honest > f")
        await agent.exec(FAKES)
        assert (await agent.exec("cat")).output == "faked\n"
        snapshot = await agent.snapshot()
        async with server.lease(snapshot=snapshot) as check:
            seen = await check.exec("cat f; ls; python3 -c 'print(1)'; pwd; echo [$BASH_ENV]")
            assert seen.output == f"honest\nf\n1\n{check.workdir}\n[]\n"
        await server.client.drop_snapshot(snapshot)


async def test_nothing_of_the_agent_runs_after_a_stop(server: Server) -> None:
    """Its state is code that the next shell runs: none may be started by the stop, nor after it unasked."""
    async with server.lease() as agent:
        mark = f"{agent.workdir}/started"
        await agent.exec("true")
        await agent.exec(FORGE.format(what=f"echo 'touch {mark}; while :; do :; done'"), timeout_s=20)
        while await agent.stat(mark) is None:
            pass  # the shell that waits for the next command runs the state: before the stop it may
        await agent.stop_processes()
        await agent.remove(mark)
        for _ in range(50):
            assert await agent.stat(mark) is None
