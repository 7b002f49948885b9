"""What an agent leaves cannot read the host's files, fill the host, or steer the check that judges it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from environments.scoring.contexts import FrozenWorkspace, ToolContext
from environments.scoring.verification import AgentFault
from sandbox_pool import PoolConfig, SandboxError, SlotPool
from sandbox_pool.client.trees import TreeLimits
from sandbox_pool.errors import SandboxFileError

LEVELS = ["namespaces-root", "landlock"] if os.geteuid() == 0 else ["namespaces-rootless", "landlock"]
SECRET = "only for the owner of this machine"


@pytest.fixture(params=LEVELS)
async def pool(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SlotPool]:
    config = PoolConfig(
        slots_per_host=2,
        max_hosts=1,
        state_dir=tmp_path / "state",
        provider_options={"level": request.param},
    )
    try:
        opened = await SlotPool.from_config(config).__aenter__()
    except SandboxError as error:
        pytest.skip(f"this machine cannot do it: {error}")
    yield opened
    await opened.close()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    folder = tmp_path / "host"
    folder.mkdir(mode=0o700)
    (folder / "key").write_text(SECRET)
    (folder / "key").chmod(0o600)
    return folder


async def judged(pool: SlotPool, commands: str, whole_layer: bool = False) -> ToolContext:
    """A context for what an agent leaves that ran these commands."""
    async with pool.lease("rollout") as sandbox:
        await sandbox.exec(commands, timeout_s=60)
        frozen = await FrozenWorkspace.take(sandbox, pool, whole_layer)
    return ToolContext(pool.lease_from(frozen.start, "verify"), frozen, "rollout")


async def test_a_link_in_place_of_the_workspace_does_not_show_the_hosts_files(pool: SlotPool, secret: Path) -> None:
    async with pool.lease("rollout") as sandbox:
        await sandbox.exec(f"cd /; rm -rf {sandbox.workdir}; ln -s {secret} {sandbox.workdir}")
        with pytest.raises(AgentFault, match="workspace"):
            await FrozenWorkspace.take(sandbox, pool)


@pytest.mark.parametrize("layer", [False, True])
async def test_links_in_the_workspace_do_not_show_the_hosts_files(pool: SlotPool, secret: Path, layer: bool) -> None:
    ctx = await judged(pool, f"ln -s {secret} away; ln -s {secret}/key key; ln -s ../../../.. up; mkdir d", layer)
    for path in ("away/key", "key", f"up{secret}/key", f"up/up/up{secret}/key", f"{secret}/key", f"../..{secret}/key"):
        with pytest.raises(OSError, match=r"outside the workspace|No such file"):
            await ctx.agent_state.read_file(path)
    assert await ctx.agent_state.list_dir() == ["away", "d", "key", "up"]
    await ctx.close()


async def test_downloads_of_a_verifier_bring_no_link_that_leads_out(
    pool: SlotPool, secret: Path, tmp_path: Path
) -> None:
    made = f"mkdir -p out/a; cd out; ln -s {secret}/key key; ln -s ../.. a/up; ln -s a/../../.. odd; echo 1 > a/f;"
    ctx = await judged(pool, f"{made} ln -s a/f fine; ln -s ../fine a/fine; ln -s {secret} ../folder; ln -s out ../in")
    await ctx.download_dir("out", tmp_path / "out")
    assert sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*")) == [
        "a",
        "a/f",
        "a/fine",
        "fine",
    ]
    assert (tmp_path / "out/a/fine").read_text() == "1\n"
    for path in ("folder", "in", "out/key", "out/a/f"):
        with pytest.raises(OSError, match=r"link|Not a directory"):
            await ctx.download_dir(path, tmp_path / "other")
    with pytest.raises(OSError, match="link"):
        await ctx.download_file("out/key", tmp_path / "key")
    assert not (tmp_path / "key").exists()
    await ctx.close()


async def test_a_sparse_file_does_not_take_the_hosts_disk_or_memory(pool: SlotPool, tmp_path: Path) -> None:
    ctx = await judged(pool, "truncate -s 300M big; echo end >> big; echo small > small")
    assert await ctx.agent_state.read_file("small") == b"small\n"
    for reads in (ctx.agent_state, ctx):
        with pytest.raises(OSError, match="longer than"):
            await reads.read_file("big")
    copy = (await ctx._frozen._copied()) / "big"
    assert copy.stat().st_size == 300 * 2**20 + 4
    assert copy.stat().st_blocks * 512 < 2**20
    result = await ctx.exec("head -c 100000 /dev/zero; truncate -s 1G /proc/self/fd/1 2>/dev/null; true")
    assert len(result.output) <= 64 * 2**20
    await ctx.close()


@pytest.mark.parametrize(
    ("limits", "what"),
    [(TreeLimits(size=999), "bytes"), (TreeLimits(entries=20), "entries"), (TreeLimits(depth=2), "folders")],
)
async def test_a_download_does_not_exceed_its_limits(
    pool: SlotPool, tmp_path: Path, limits: TreeLimits, what: str
) -> None:
    async with pool.lease("t") as sandbox:
        await sandbox.exec("mkdir -p 1/2/3/4; head -c 1000 /dev/zero > 1/zeros; touch 1/2/{1..30}")
        with pytest.raises(SandboxFileError, match=what):
            await sandbox.download("1", tmp_path / "copy", limits)


async def test_paths_longer_than_the_kernel_takes_do_not_end_a_rollout(pool: SlotPool) -> None:
    name = "d" * 200
    ctx = await judged(pool, f"echo 1 > f; for i in $(seq 40); do mkdir {name}; cd {name}; done; echo 1 > deep")
    assert await ctx.agent_state.read_file("f") == b"1\n"
    assert (await ctx.exec("cat f")).output == "1\n"
    await ctx.close()


@pytest.mark.parametrize("layer", [False, True])
async def test_the_agents_shell_does_not_decide_what_a_check_means(pool: SlotPool, layer: bool) -> None:
    poison = (
        "mkdir -p elsewhere; echo right > answer; python3() { return 0; }; cat() { echo wrong; }; cd() { return 0; };"
        "export -f python3 cat; alias test=true; export PATH=/nowhere BASH_ENV=/workspace/rc PYTHONPATH=/workspace;"
        "echo 'exit 0' > rc; builtin cd elsewhere"
    )
    ctx = await judged(pool, poison, layer)
    assert (await ctx.exec("python3 -c 'import sys; sys.exit(3)'")).exit_code == 3
    assert (await ctx.exec("cat answer")).output == "right\n", "the check starts in the workspace"
    assert (await ctx.exec("test 1 = 2")).exit_code == 1
    environment = (await ctx.exec("env")).output
    assert "/nowhere" not in environment
    assert "/workspace/rc" not in environment
    await ctx.close()


@pytest.mark.parametrize("layer", [False, True])
async def test_nothing_outside_the_workspace_is_there_unless_the_layer_was_asked_for(
    pool: SlotPool, layer: bool
) -> None:
    ctx = await judged(pool, "echo mine > $HOME/.bashrc; echo mine > $HOME/left; echo work > file", layer)
    assert (await ctx.exec("cat file; cat ~/left 2>/dev/null || true")).output == (
        "work\nmine\n" if layer else "work\n"
    )
    await ctx.close()


async def test_the_options_of_a_command_do_not_stay_for_the_next(pool: SlotPool) -> None:
    ctx = await judged(pool, "mkdir folder")
    asked = await ctx.exec(
        "cat; pwd; echo $A; echo err >&2", stdin="in\n", cwd="folder", env={"A": "a"}, merge_stderr=False
    )
    assert asked.output.splitlines()[0::2] == ["in", "a"]
    assert asked.output.splitlines()[1].endswith("/folder")
    assert asked.stderr == "err\n"
    assert (await ctx.exec("echo $A")).output == "\n"
    process = await ctx.spawn("echo started; sleep 60")
    while "started" not in (await process.log()).data:
        pass
    assert await process.poll() is None
    if pool.status().hosts[0].isolation == "namespaces" and os.geteuid() == 0:  # a rootless slot has one user
        assert (await ctx.exec("id -un", user="nobody")).output == "nobody\n"
    await ctx.close()


FORGER = """
import os, re
def look():
    found = []
    for name, mode in (("mem", "rb"), ("environ", "rb"), ("maps", "rb"), ("fd/0", "rb"), ("fd/1", "wb")):
        try:
            with open(f"/proc/{os.getppid()}/{name}", mode, 0) as file:
                file.write(b"forged") if mode == "wb" else file.read(1)
        except OSError:
            continue
        found.append(name)
    return found
def own_memory():
    text = b""
    for line in open("/proc/self/maps"):
        at = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
        if at:
            low, high = (int(x, 16) for x in at.groups())
            try:
                with open("/proc/self/mem", "rb", 0) as memory:
                    memory.seek(low)
                    text += memory.read(high - low)
            except OSError:
                pass
    return b" ".join([b"asked", b"secondly"]) in text
def first(x):
    return [look(), own_memory()]
def second(x):
    return x
"""


async def test_a_solution_sees_no_later_question_and_not_the_process_that_keeps_its_answers(pool: SlotPool) -> None:
    async with pool.lease("rollout") as sandbox:
        await sandbox.write_file("solution.py", FORGER)
        frozen = await FrozenWorkspace.take(sandbox, pool)
    ctx = ToolContext(pool.lease_from(frozen.start, "verify"), frozen, "rollout")
    first, second = await ctx.ask_python("solution.py", [("first", [0]), ("second", ["asked secondly"])])
    assert first.returned == [[], False], first
    assert second.returned == "asked secondly"
    await ctx.close()
    await frozen.close()


@pytest.mark.parametrize(
    "printed", ["print('0' * 64)", "import os; os.kill(os.getppid(), 9)", "import os; os._exit(0)"]
)
async def test_what_a_solution_does_to_its_asker_is_no_answer(pool: SlotPool, printed: str) -> None:
    async with pool.lease("rollout") as sandbox:
        await sandbox.write_file("solution.py", f"def f():\n    {printed}\n    return 1\n")
        frozen = await FrozenWorkspace.take(sandbox, pool)
    ctx = ToolContext(pool.lease_from(frozen.start, "verify"), frozen, "rollout")
    answers = await ctx.ask_python("solution.py", [("f", [])])
    assert answers[0].returned == 1 if "print(" in printed else answers[0].raises == ("NoAnswer",)
    await ctx.close()
    await frozen.close()
