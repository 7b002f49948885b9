"""What an agent started does not outlive its host, also when server, helper and client are killed at once."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import uuid
from pathlib import Path

import pytest

from sandbox_pool import PoolConfig, SandboxSpec
from sandbox_pool.client.host_client import HostClient
from sandbox_pool.errors import SandboxError
from sandbox_pool.journal.owner import this_process
from sandbox_pool.providers.base import ProviderContext, load_provider
from sandbox_pool.server.cleanup import start_ticks
from support.pool_wait import eventually


def processes_with(mark):
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def below(pid):
    """A process and all its descendants, those first that would clean up after the others."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *(each for child in children for each in below(int(child)))]
    return [pid]


@pytest.fixture
def place():
    path = Path(tempfile.mkdtemp(prefix="left-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def make(place, level):
    """A server without cgroups, as an ordinary user has it."""
    options = {"level": level}
    if os.getuid() == 0:
        options |= {"user": "nobody", "python": "/usr/bin/python3"}
    config = PoolConfig(state_dir=place / "state", scratch_dir=place, slots_per_host=2)
    return load_provider("local", ProviderContext.of(config, this_process().tag()), options)


@pytest.mark.parametrize("level", ["landlock", "plain"])
@pytest.mark.parametrize("killed", ["server", "server and helper", "all but the agent's"])
async def test_daemons_of_a_killed_server_are_gone_after_gc(place, level, killed):
    mark = f"mark-{uuid.uuid4().hex}"
    provider = make(place, level)
    host = await provider.start("h1", SandboxSpec())
    client = await HostClient.connect(host.address, host.token)
    box = await client.lease(0, task_id="t", spec=SandboxSpec())
    plain = (
        killed == "all but the agent's" and level == "plain"
    )  # there it could change its limits, which tell whose it is
    hidden = "" if plain else f"env -i setsid sleep 900 {mark} & "
    script = f"cd /; setsid bash -c 'sleep 900 & wait' {mark} & {hidden} exec -a {mark} sleep 900 &"
    await box.exec(script.replace(f"sleep 900 {mark}", f"bash -c 'sleep 900; :' {mark}"))
    await eventually(lambda: len(processes_with(mark)) >= (3 if hidden else 2))
    server = int(host.identity)
    victims = {
        "server": [server],
        "server and helper": below(server)[:2],
        "all but the agent's": [pid for pid in below(server) if pid not in processes_with(mark)],
    }[killed]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):  # the shell that started them has ended meanwhile
                os.kill(pid, number)
    await provider._processes["h1"].wait()
    await client.close()
    await make(place, level).stop("h1")
    await eventually(lambda: processes_with(mark) == [])
    await provider.stop("h1")
    assert await asyncio.to_thread(lambda: [path.name for path in place.iterdir()]) in (["state"], [])


@pytest.mark.parametrize("level", ["landlock", "plain"])
async def test_a_shell_of_a_killed_server_is_gone_after_gc(place, level):
    """It shows neither environment nor working directory, to nobody but root."""
    provider = make(place, level)
    host = await provider.start("h1", SandboxSpec())
    client = await HostClient.connect(host.address, host.token)
    box = await client.lease(0, task_id="t", spec=SandboxSpec())
    loop = asyncio.create_task(box.exec("cd /; read -r stat </proc/self/stat; echo $stat >~/pid; while :; do :; done"))
    while (said := await box.stat("../home/pid")) is None or not said.size:
        pass
    shell = int((await box.read_file("../home/pid")).split()[0])
    try:
        victims = [pid for pid in below(int(host.identity)) if int(pid) != shell]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):  # some die with their parent
                    os.kill(int(pid), number)
        await provider._processes["h1"].wait()
        with pytest.raises(SandboxError):
            await loop
        await client.close()
        assert start_ticks(shell) is not None
        await make(place, level).stop("h1")
        assert start_ticks(shell) is None
    finally:
        with contextlib.suppress(OSError):
            os.kill(shell, signal.SIGKILL)
    await provider.stop("h1")
