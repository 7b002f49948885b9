"""The local provider with the real slot server: hosts by name, found again, stopped without a trace."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from sandbox_pool import HostStartFailed, IsolationUnavailable, PoolConfig, SandboxSpec, ScratchFull
from sandbox_pool.client.host_client import HostClient
from sandbox_pool.journal.owner import this_process
from sandbox_pool.providers import local
from sandbox_pool.providers.base import ProviderContext, load_provider
from support.pool_leftovers import cgroup_name, leftovers
from support.pool_wait import eventually

SPEC = SandboxSpec()


def read_bytes(path):
    return Path(path).read_bytes()


@pytest.fixture
def make_provider(tmp_path):
    def make(options=None, **config):
        config = PoolConfig(state_dir=tmp_path / "state", scratch_dir=tmp_path / "s", **{"slots_per_host": 2, **config})
        return load_provider("local", ProviderContext.of(config, this_process().tag()), options or {})

    return make


async def test_a_host_starts_answers_and_goes_without_a_trace(make_provider, tmp_path):
    provider = make_provider()
    host = await provider.start("h1", SPEC)
    client = await HostClient.connect(host.address, host.token)
    assert client.info.slots == 2
    assert client.info.host_id == "h1"
    assert str(client.info.pid) == host.identity
    await client.close()
    cgroups = [cgroup_name(tmp_path / "s" / f"hermes-rl-{os.getuid()}" / "h1" / "scratch")]
    await provider.stop("h1")
    assert leftovers(tmp_path / "s", cgroups) == {}


async def test_the_same_name_again_is_the_same_host_for_any_process(make_provider):
    provider = make_provider()
    first = await provider.start("h1", SPEC)
    assert (await provider.start("h1", SPEC)) == first
    another = make_provider()
    assert (await another.start("h1", SPEC)) == first
    await another.stop("h1")
    await provider.stop("h1")
    assert await provider.list() == []


async def test_stopping_what_never_was_is_fine(make_provider):
    provider = make_provider()
    await provider.stop("never-was")
    await provider.stop("never-was")


async def test_hosts_are_listed_with_their_owner_from_the_disk_alone(make_provider):
    provider = make_provider()
    await provider.start("h1", SPEC)
    (record,) = await make_provider().list()
    assert (record.name, record.owner, record.state) == ("h1", this_process().tag(), "running")
    await provider.stop("h1")


async def test_a_killed_server_is_listed_as_dead_and_its_name_can_be_started_again(make_provider):
    provider = make_provider()
    host = await provider.start("h1", SPEC)
    os.kill(int(host.identity), signal.SIGKILL)
    await provider._processes["h1"].wait()
    assert [record.state for record in await provider.list()] == ["dead"]
    again = await provider.start("h1", SPEC)
    assert again.identity != host.identity
    client = await HostClient.connect(again.address, again.token)
    await client.close()
    await provider.stop("h1")


async def test_a_directory_without_a_record_is_cleaned_up_too(make_provider, tmp_path):
    provider = make_provider()
    stray = tmp_path / "s" / f"hermes-rl-{os.getuid()}" / "stray"
    (stray / "scratch").mkdir(parents=True)
    assert await provider.list() == []  # somebody may be about to write its record
    os.utime(stray, (0, 0))
    assert [record.name for record in await provider.list()] == ["stray"]
    await provider.stop("stray")
    assert not stray.exists()


async def test_the_server_sees_nothing_of_the_clients_environment(make_provider, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    provider = make_provider()
    host = await provider.start("h1", SPEC)
    visible = read_bytes(f"/proc/{host.identity}/environ") + read_bytes(f"/proc/{host.identity}/cmdline")
    assert b"sk-secret" not in visible
    assert host.token.encode() not in visible
    await provider.stop("h1")


async def test_a_python_that_needs_its_libraries_named_can_run_the_server_and_slots_see_nothing_of_it(
    make_provider, monkeypatch, tmp_path
):
    """As the Pythons of HPC modules do."""
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
[ "$LD_LIBRARY_PATH" = /opt/module/lib ] || {{ echo "libpython3.so: cannot open shared object file" >&2; exit 127; }}
exec {sys.executable} "$@"
""")
    python.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/module/lib")
    provider = make_provider({"python": str(python)})
    host = await provider.start("h1", SPEC)
    client = await HostClient.connect(host.address, host.token)
    sandbox = await client.lease(0, task_id="t", spec=SPEC)
    result = await sandbox.exec("env; cat /proc/1/environ")
    await client.close()
    await provider.stop("h1")
    assert "LD_LIBRARY_PATH" not in result.output


async def test_signals_that_the_client_ignores_are_not_ignored_in_slots(make_provider):
    """A shell has what it starts with `&` ignore interrupts, and whoever ignores one passes that on."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        provider = make_provider()
        host = await provider.start("h1", SPEC)
    finally:
        signal.signal(signal.SIGINT, before)
    client = await HostClient.connect(host.address, host.token)
    sandbox = await client.lease(0, task_id="t", spec=SPEC)
    result = await sandbox.exec("grep SigIgn /proc/self/status")
    await client.close()
    await provider.stop("h1")
    assert int(result.output.split()[1], 16) & 1 << (signal.SIGINT - 1) == 0


async def test_isolation_that_cannot_be_had_is_its_own_error(make_provider):
    provider = make_provider({"level": "plain"}, min_isolation="namespaces")
    with pytest.raises(IsolationUnavailable, match="namespaces"):
        await provider.start("h1", SPEC)
    await provider.stop("h1")


async def test_a_server_that_cannot_start_says_why(make_provider, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho this interpreter is broken >&2\nexit 1\n")
    broken.chmod(0o755)
    provider = make_provider({"python": str(broken)})
    with pytest.raises(HostStartFailed, match="this interpreter is broken"):
        await provider.start("h1", SPEC)
    await provider.stop("h1")


async def test_another_pool_that_removes_the_empty_root_at_that_moment_does_no_harm(
    make_provider, tmp_path, monkeypatch
):
    removed = []

    def remove_root(root, min_mb):
        if len(removed) < 3:
            removed.append(root.rmdir())

    monkeypatch.setattr(local, "require_space", remove_root)
    provider = make_provider()
    await provider.start("h1", SandboxSpec())
    await provider.stop("h1")
    assert len(removed) == 3


async def test_no_server_is_started_on_a_full_disk(make_provider):
    with pytest.raises(ScratchFull):
        await make_provider(scratch_min_mb=10**9).start("h1", SPEC)


async def test_unknown_options_are_refused(make_provider):
    with pytest.raises(ValueError, match="levle"):
        make_provider({"levle": "plain"})


@pytest.mark.parametrize("name", ["", "..", "a/b", "../../etc"])
async def test_names_that_would_leave_the_scratch_space_are_refused(make_provider, name):
    with pytest.raises(ValueError, match="not a host name"):
        await make_provider().stop(name)


async def test_a_scratch_path_too_long_for_a_socket_works(tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    config = PoolConfig(state_dir=tmp_path / "state", scratch_dir=deep, slots_per_host=1)
    provider = load_provider("local", ProviderContext.of(config, this_process().tag()), {})
    host = await provider.start("h1", SPEC)
    client = await HostClient.connect(host.address, host.token)
    await client.close()
    await provider.stop("h1")
    assert not os.access(host.address.removeprefix("unix:"), os.F_OK)


async def test_something_that_cannot_be_removed_is_an_error_and_not_silence(make_provider, tmp_path, monkeypatch):
    provider = make_provider()
    stray = tmp_path / "s" / f"hermes-rl-{os.getuid()}" / "stray"
    stray.mkdir(parents=True)
    monkeypatch.setattr("sandbox_pool.providers.local.remove_tree", lambda path: [f"{path}: busy"])
    with pytest.raises(Exception, match="could not be removed"):
        await provider.stop("stray")


async def test_remains_that_the_clean_up_reports_keep_the_host_on_record(make_provider, monkeypatch):
    provider = make_provider()
    await provider.start("h1", SPEC)
    monkeypatch.setattr("sandbox_pool.providers.local.clean", lambda scratch: ["a cgroup is still there"])
    with pytest.raises(Exception, match="a cgroup is still there"):
        await provider.stop("h1")
    assert [record.name for record in await provider.list()] == ["h1"]
    monkeypatch.undo()
    await provider.stop("h1")
    assert await provider.list() == []


async def test_a_host_whose_owner_is_cancelled_while_it_starts_is_stopped_by_name(make_provider, tmp_path):
    provider = make_provider()
    task = asyncio.create_task(provider.start("h1", SPEC))
    await eventually(lambda: list(tmp_path.glob("s/*/h1/server.log")))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await provider.stop("h1")
    assert await provider.list() == []


async def test_the_record_of_a_host_holds_no_secret(make_provider, tmp_path):
    provider = make_provider()
    host = await provider.start("h1", SPEC)
    (record,) = (tmp_path / "s").glob("*/h1/host.json")
    assert host.token not in record.read_text()
    assert json.loads(record.read_text())["name"] == "h1"
    await provider.stop("h1")
