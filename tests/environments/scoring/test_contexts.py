"""Verification in a fork: whole results, byte-exact files, and nothing the agent left can steer it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from environments.scoring.contexts import Answer, FrozenWorkspace, ToolContext
from environments.scoring.verification import CheckTimeout
from support.env_pool import DirectoryPool, DirectorySandbox


@pytest.fixture
def pool() -> Iterator[DirectoryPool]:
    made = DirectoryPool()
    yield made
    made.close()


@pytest.fixture
async def agent(pool: DirectoryPool) -> AsyncIterator[DirectorySandbox]:
    async with pool.lease("rollout") as sandbox:
        yield sandbox


async def context(pool: DirectoryPool, agent: DirectorySandbox, *verifier_paths: str) -> ToolContext:
    frozen = await FrozenWorkspace.take(agent, pool)
    return ToolContext(pool.lease_from(frozen.start, "rollout/verify"), frozen, "rollout", verifier_paths)


async def test_the_fork_has_the_agents_files_and_changes_there_stay_there(
    pool: DirectoryPool, agent: DirectorySandbox
) -> None:
    await agent.write_file("answer.txt", b"42")
    ctx = await context(pool, agent)
    assert await ctx.read_file("answer.txt") == b"42"
    await ctx.write_file("answer.txt", b"changed by the verifier")
    await ctx.terminal("rm -rf ./* && echo gone > new.txt")
    assert await ctx.agent_state.read_file("answer.txt") == b"42"
    assert await ctx.agent_state.list_dir() == ["answer.txt"]
    assert await agent.read_file("answer.txt") == b"42"
    await ctx.close()


async def test_an_end_state_names_what_holds_no_text(pool: DirectoryPool, agent: DirectorySandbox) -> None:
    await agent.write_file("notes/one.txt", b"text")
    await agent.exec("mkdir -p made/deep && ln -s nowhere link && printf '\\377' > bytes")
    ctx = await context(pool, agent)
    assert await ctx.agent_state.texts() == {
        "bytes": "(1 bytes, not text)",
        "link": "(link to nowhere)",
        "made/deep": "(empty folder)",
        "notes/one.txt": "text",
    }
    await ctx.close()


async def test_no_fork_is_leased_for_a_reward_that_asks_for_nothing(
    pool: DirectoryPool, agent: DirectorySandbox
) -> None:
    await agent.write_file("answer.txt", b"42")
    ctx = await context(pool, agent)
    assert await ctx.agent_state.read_file("answer.txt") == b"42"
    await ctx.close()
    assert pool.leases == ["rollout"]


async def test_what_the_agent_left_in_the_verifiers_paths_is_gone(pool: DirectoryPool, agent: DirectorySandbox) -> None:
    await agent.write_file("tests/test_it.py", b"print('passed')")
    await agent.write_file("conftest.py", b"import os; os._exit(0)")
    ctx = await context(pool, agent, "tests", "conftest.py", "never/there")
    assert list(await ctx.list_dir()) == []
    assert await ctx.agent_state.read_file("tests/test_it.py") == b"print('passed')"
    await ctx.close()


async def test_tests_replace_whatever_the_agent_put_in_their_place(
    pool: DirectoryPool, agent: DirectorySandbox
) -> None:
    await agent.exec("mkdir -p check.py && touch check.py/x && ln -s /etc/passwd run.sh")
    ctx = await context(pool, agent)
    await ctx.put_tests({"check.py": "real", "run.sh": b"real"})
    assert (await ctx.stat("run.sh")).kind == "file"
    assert await ctx.read_file("check.py") == b"real"
    await ctx.close()


async def test_the_agents_processes_are_stopped_before_the_copy(pool: DirectoryPool, agent: DirectorySandbox) -> None:
    await agent.exec("(while true; do date +%s%N > ticking; sleep 0.01; done) > /dev/null 2>&1 &")
    await agent.exec("until [ -s ticking ]; do sleep 0.01; done", timeout_s=20)
    ctx = await context(pool, agent)
    frozen = await ctx.agent_state.read_file("ticking")
    await asyncio.sleep(0.1)
    assert await agent.read_file("ticking") == frozen
    await ctx.close()


async def test_results_are_whole_and_bytes_are_exact(
    pool: DirectoryPool, agent: DirectorySandbox, tmp_path: Path
) -> None:
    data = os.urandom(300_000)
    (tmp_path / "in.bin").write_bytes(data)
    ctx = await context(pool, agent)
    assert len((await ctx.terminal("head -c 200000 /dev/zero | tr '\\0' x"))["output"]) == 200_000
    await ctx.upload_file(tmp_path / "in.bin", "deep/in.bin")
    await ctx.download_file("deep/in.bin", tmp_path / "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == data
    await ctx.download_dir("deep", tmp_path / "deep")
    assert (tmp_path / "deep/in.bin").read_bytes() == data
    with pytest.raises(FileNotFoundError, match="no file"):
        await ctx.upload_file(tmp_path / "missing", "x")
    await ctx.close()


async def test_terminal_tells_exit_codes_and_a_timeout_is_never_one(
    pool: DirectoryPool, agent: DirectorySandbox
) -> None:
    ctx = await context(pool, agent)
    assert await ctx.terminal("echo hi; exit 3") == {"output": "hi\n", "exit_code": 3}
    for run in (ctx.terminal("sleep 30", timeout=0.1), ctx.exec("sleep 30", timeout_s=0.1)):
        with pytest.raises(CheckTimeout, match="sleep 30"):
            await run
    assert (await ctx.exec("sleep 30", timeout_s=0.1, may_time_out=True)).timed_out
    await ctx.close()


async def test_search_finds_every_line_with_odd_names(pool: DirectoryPool, agent: DirectorySandbox) -> None:
    await agent.write_file("a b:1.txt", b"one\nneedle: 1\n")
    ctx = await context(pool, agent)
    [hit] = await ctx.search("needle")
    assert (hit.path, hit.line, hit.text) == ("./a b:1.txt", 2, "needle: 1")
    assert await ctx.search("absent") == []
    with pytest.raises(ValueError, match="failed"):
        await ctx.search("(")
    await ctx.close()


async def test_call_tool_gives_what_the_model_would_read(pool: DirectoryPool, agent: DirectorySandbox) -> None:
    async def tool(sandbox: object, name: str, arguments: dict[str, object]) -> str:
        return f'{{"name": "{name}"}}' if arguments else "plain text"

    frozen = await FrozenWorkspace.take(agent, pool)
    ctx = ToolContext(pool.lease_from(frozen.start, "rollout/verify"), frozen, "rollout", call_tool=tool)
    assert await ctx.call_tool("read_file", {"path": "x"}) == {"name": "read_file"}
    assert await ctx.call_tool("x", {}) == {"output": "plain text"}
    await ctx.close()


async def test_nothing_is_left_after_close(pool: DirectoryPool, agent: DirectorySandbox) -> None:
    ctx = await context(pool, agent)
    await ctx.terminal("true")
    assert set(pool.live) == {"rollout", "rollout/verify"}
    assert await ctx.agent_state.list_dir() == []
    copy = await ctx._frozen._copied()
    assert copy.exists()
    await ctx.close()
    await ctx._frozen.close()
    assert set(pool.live) == {"rollout"}
    assert pool.snapshots == []
    assert not copy.exists()


@pytest.mark.parametrize("link", ["/etc/passwd", "../../../../../../etc/passwd", "/workspace/../../etc/passwd"])
async def test_agent_state_never_follows_a_link_to_the_hosts_files(
    pool: DirectoryPool, agent: DirectorySandbox, link: str
) -> None:
    (agent.root / "link").symlink_to(link)
    (agent.root / "dir").symlink_to("/etc")
    ctx = await context(pool, agent)
    for path in ("link", "dir/passwd"):
        with pytest.raises(OSError, match=r"outside the workspace|No such file"):
            await ctx.agent_state.read_file(path)
    assert (await ctx.agent_state.stat("link")).kind == "symlink"
    await ctx.close()


async def test_agent_state_follows_links_inside_the_workspace(pool: DirectoryPool, agent: DirectorySandbox) -> None:
    await agent.write_file("real/file", b"data")
    (agent.root / "relative").symlink_to("real/file")
    (agent.root / "absolute").symlink_to("/workspace/real")
    (agent.root / "loop").symlink_to("loop")
    ctx = await context(pool, agent)
    state = ctx.agent_state
    assert await state.read_file("relative") == b"data"
    assert await state.read_file("/workspace/absolute/file") == b"data"
    with pytest.raises(OSError, match="too many levels"):
        await state.read_file("loop")
    with pytest.raises(OSError, match="not a regular file"):
        await state.read_file("real")
    with pytest.raises(OSError, match="outside the workspace"):
        await state.stat("/etc/passwd")
    await ctx.close()


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "print('[]'); raise SystemExit(0)",
        "def f(x):\n    import os; os._exit(0)",
        "def f(x):\n    while True: pass",
        "import json, os, sys\njson.dump([[{'returns': 3, 'raises': ['E']}]], open(sys.argv[3], 'w')); os._exit(0)",
        "class E:\n    __eq__ = lambda *a: True\ndef f(x): return E()",
    ],
)
async def test_code_that_does_not_answer_is_never_taken_for_an_answer(
    pool: DirectoryPool, agent: DirectorySandbox, code: str
) -> None:
    await agent.write_file("solution.py", code.encode())
    ctx = await context(pool, agent)
    [answer] = await ctx.ask_python("solution.py", [("f", [2])], timeout_s=3)
    assert answer.raises == ("NoAnswer",)
    assert answer.why
    await ctx.close()


async def test_answers_are_values_or_exceptions_and_nothing_of_the_workspace_shadows_them(
    pool: DirectoryPool, agent: DirectorySandbox
) -> None:
    await agent.write_file("solution.py", b"def f(x):\n    return (x, [1.5])\ndef g():\n    return {}['k']\n")
    for name in ("json.py", "unittest.py", "conftest.py", "sitecustomize.py"):
        await agent.write_file(name, b"import os; os._exit(0)")
    ctx = await context(pool, agent)
    returned, raised = await ctx.ask_python("solution.py", [("f", [2]), ("g", [])])
    assert returned == Answer((2, [1.5]))
    assert raised.raises[:2] == ("KeyError", "LookupError")
    await ctx.close()
