"""Another user of this machine gets nothing of ours run, read, killed or removed, and both users can work."""

import asyncio
import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sandbox_pool import PoolConfig, SandboxSpec, StateError
from sandbox_pool.journal.gc import collect_orphans, default_place
from sandbox_pool.journal.journal import Journal
from sandbox_pool.journal.owner import start_ticks, this_process
from sandbox_pool.owned_folders import make_owned_folder
from sandbox_pool.providers import local
from sandbox_pool.providers.base import ProviderContext, load_provider
from sandbox_pool.server.build.packing import pack
from sandbox_pool.server.host_files import NotPrivate, open_private
from support.slot_server import NOBODY

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user as well")
ROOT = Path(__file__).parents[2]
OWN = f"hermes-rl-{os.getuid()}"
SPEC = SandboxSpec()


@pytest.fixture
def shared():
    """A place like /tmp: everybody may make things there."""
    path = Path(tempfile.mkdtemp(prefix="attack-", dir="/tmp"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def victim():
    """A process that nobody but us may end."""
    process = subprocess.Popen(["sleep", "300"])
    yield process
    assert process.poll() is None, "somebody ended it"
    process.kill()
    process.wait()


def as_nobody(*command, **options):
    return subprocess.run(
        command, user="nobody", group="nogroup", extra_groups=[], check=True, capture_output=True, text=True, **options
    )


def plant_folder(path, mode="777"):
    as_nobody("mkdir", "-m", mode, str(path))


def provider_in(scratch, state, options=None):
    config = PoolConfig(state_dir=state, scratch_dir=scratch, slots_per_host=1)
    return load_provider("local", ProviderContext.of(config, this_process().tag()), options or {})


@pytest.mark.parametrize("plant", ["folder", "link", "place"])
async def test_root_runs_nothing_from_a_folder_that_another_user_can_change(shared, tmp_path, plant):
    scratch = shared
    if plant == "folder":
        plant_folder(shared / OWN)
    elif plant == "link":
        (shared / "target").mkdir()
        as_nobody("ln", "-s", str(shared / "target"), str(shared / OWN))
    else:
        scratch = shared / "theirs"
        plant_folder(scratch)
    with pytest.raises(StateError, match="scratch_dir"):
        await provider_in(scratch, tmp_path / "state").start("h1", SPEC)
    assert list(scratch.rglob("server.py")) == []


async def test_another_place_is_taken_when_a_user_has_taken_our_name_in_the_first(shared, tmp_path, monkeypatch):
    plant_folder(shared / OWN)
    free = tmp_path / "free"
    free.mkdir()
    monkeypatch.setattr(local, "candidates", lambda: [shared, free])
    provider = provider_in(None, tmp_path / "state")
    await provider.start("h1", SPEC)
    assert (free / OWN / "h1").is_dir()
    assert [record.name for record in await provider.list()] == ["h1"]
    await provider.stop("h1")
    assert list((shared / OWN).iterdir()) == []


async def test_a_host_is_found_again_when_the_first_place_can_be_used_later(shared, tmp_path, monkeypatch):
    plant_folder(shared / OWN)
    free = tmp_path / "free"
    free.mkdir()
    monkeypatch.setattr(local, "candidates", lambda: [shared, free])
    first = provider_in(None, tmp_path / "state")
    await first.start("h1", SPEC)
    (shared / OWN).rmdir()
    later = provider_in(None, tmp_path / "state")
    assert [record.state for record in await later.list()] == ["running"]
    await first.stop("h1")
    await later.stop("h1")
    assert list(free.iterdir()) == []


async def test_a_planted_record_kills_no_process(shared, tmp_path, victim):
    plant_folder(shared / OWN)
    record = {"name": "h1", "owner": "nobody", "pid": victim.pid, "ticks": start_ticks(victim.pid), "created_s": 0}
    plan = shared / OWN / "h1"
    as_nobody("sh", "-c", f"mkdir -p {plan}/scratch; cat > {plan}/host.json", input=json.dumps(record))
    as_nobody("sh", "-c", f"cat > {plan}/scratch/server.json", input=json.dumps([[victim.pid, record["ticks"]]]))
    journal = Journal(tmp_path / "state")
    report = await collect_orphans(journal, tmp_path / "state", this_process(), places=[default_place("local", shared)])
    journal.close()
    assert [action.done for action in report.actions if "belongs to nobody" in action.reason] == ["failed"]
    assert plan.exists()


async def test_a_record_of_ours_that_names_a_process_without_our_file_kills_nothing(tmp_path, victim):
    """As after a reboot or a copied folder: number and start may match by chance or by plan."""
    provider = provider_in(tmp_path / "s", tmp_path / "state")
    await provider.start("h1", SPEC)
    await provider.stop("h1")
    host = tmp_path / "s" / OWN / "h1"
    (host / "scratch").mkdir(parents=True)
    (host / "alive").touch()
    (host / "host.json").write_text(json.dumps({"name": "h1", "pid": victim.pid, "ticks": start_ticks(victim.pid)}))
    assert [record.state for record in await provider.list()] == ["dead"]
    await provider.stop("h1")
    assert not host.exists()


@pytest.mark.parametrize("length", [1, 120], ids=["short", "long"])
async def test_the_user_of_a_server_cannot_change_what_root_reads_and_runs(shared, tmp_path, victim, length):
    shared.chmod(0o755)
    shared = shared / ("d" * length)
    provider = provider_in(
        shared, tmp_path / "state", {"user": "nobody", "level": "plain", "python": "/usr/bin/python3"}
    )
    started = await provider.start("h1", SPEC)
    host = shared / OWN / "h1"
    for name in ("host.json", "server.py", "server.log", "alive"):
        assert (host / name).stat().st_uid == 0
        with pytest.raises(subprocess.CalledProcessError):
            as_nobody("sh", "-c", f"echo x > {host / name} || mv {host / name} {host}/x")
    as_nobody(
        "sh", "-c", f"cat > {host}/scratch/server.json", input=json.dumps([[victim.pid, start_ticks(victim.pid)]])
    )
    await provider.stop("h1")
    assert not host.exists()
    assert not Path(started.address.removeprefix("unix:")).parent.exists()


def test_folders_of_this_process_are_never_made_where_another_user_writes(shared, tmp_path, monkeypatch):
    plant_folder(shared / f"hermes-rl-folders-{os.getuid()}")
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    folder = make_owned_folder("x-")
    assert not folder.is_relative_to(shared)
    with pytest.raises(StateError, match="belongs to nobody"):
        make_owned_folder("x-", shared / f"hermes-rl-folders-{os.getuid()}")


@pytest.mark.parametrize("mode", ["755", "777"])
def test_the_journal_and_the_key_are_not_read_from_another_users_folder(shared, mode):
    plant_folder(shared / "state", mode)
    with pytest.raises(StateError, match="belongs to nobody"):
        Journal(shared / "state")
    with pytest.raises(StateError, match="belongs to nobody"):
        ProviderContext(owner="me", slots=1, state_dir=shared / "state").token("h1")


@pytest.mark.parametrize(("mode", "group"), [(0o777, 0), (0o2775, NOBODY)])
def test_a_folder_below_one_where_others_can_rename_is_not_private(tmp_path, mode, group):
    (tmp_path / "open").mkdir()
    os.chown(tmp_path / "open", 0, group)
    (tmp_path / "open").chmod(mode)
    with pytest.raises(NotPrivate, match="others can rename"):
        open_private(tmp_path / "open" / "ours")


@pytest.mark.parametrize("of", ["state", "."])
def test_a_list_of_users_who_may_write_is_seen(tmp_path, of):
    """In the mode it looks like the right of root's own group."""
    (tmp_path / "state").mkdir()
    entries = (1, 7, -1), (2, 7, NOBODY), (4, 5, -1), (16, 7, -1), (32, 5, -1)
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(tmp_path / of, "system.posix_acl_access", acl)
    except OSError:
        pytest.skip("this file system has no lists")
    with pytest.raises(StateError, match="others can"):
        Journal(tmp_path / "state")


def test_the_helper_is_not_taken_from_a_cache_that_another_user_made(shared, monkeypatch):
    honest = pack()
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    plant_folder(shared / "hermes-rl")
    cached = sorted(path.name for path in _own_cache().glob("slot-*"))
    for name in cached:
        as_nobody("sh", "-c", f"echo planted > {shared}/hermes-rl/{name}")
    assert pack() == honest
    assert {path.read_text() for path in (shared / "hermes-rl").iterdir()} <= {"planted\n"}


def _own_cache():
    return Path.home() / ".cache" / "hermes-rl"


def test_layers_are_not_put_into_a_folder_that_another_user_made(tmp_path):
    from sandbox_pool.server.isolation import layers

    theirs = [Path(path) for path in layers.shared_memory_paths(str(tmp_path))]
    for folder in theirs:
        plant_folder(folder)
    (tmp_path / "layers").mkdir()
    try:
        as_nobody("touch", *(f"{folder}/mine" for folder in theirs))
        assert layers.usable_shared_memory(str(tmp_path)) is None
        layers.remove_layers_dir(str(tmp_path))
        assert all((folder / "mine").exists() for folder in theirs)
    finally:
        for folder in theirs:
            shutil.rmtree(folder)


def test_layers_whose_scratch_space_is_gone_are_swept_and_those_of_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted link must not have root remove what somebody else has in shared memory, nor what is in use."""
    from sandbox_pool.server.isolation import layers

    monkeypatch.setattr(layers, "SHARED_MEMORY", str(tmp_path))
    for name, leads_to in (("hermes_gone", "nowhere"), ("hermes_used", "."), ("other_gone", "nowhere")):
        (tmp_path / name).mkdir(mode=0o700)
        (tmp_path / name / "scratch").symlink_to(tmp_path / leads_to)
    (tmp_path / "hermes_link").symlink_to("hermes_used")
    (tmp_path / "hermes_plain").mkdir(mode=0o700)
    layers.sweep_shared_memory()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "hermes_link",
        "hermes_plain",
        "hermes_used",
        "other_gone",
    ]


USE = """
import asyncio, sys
from pathlib import Path
from sandbox_pool import PoolConfig, SlotPool

async def main():
    async with SlotPool.from_config(PoolConfig(slots_per_host=1, scratch_dir=Path(sys.argv[1]))) as pool:
        async with pool.lease("t") as box:
            print((await box.exec("echo works")).output.strip(), flush=True)
            sys.stdin.readline()

asyncio.run(main())
"""


def _interpreter():
    """One that other users can run, with our packages: a Python in root's home is not."""
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])
    for python in (sys.executable, shutil.which("python3", path="/usr/bin") or ""):
        with contextlib.suppress(subprocess.CalledProcessError, OSError):
            as_nobody(python, "-P", "-c", "import sandbox_pool.pool.pool", env={"PYTHONPATH": paths}, cwd="/")
            return python, paths
    return None


async def test_two_users_can_work_in_one_scratch_space_at_the_same_time(shared):
    found = await asyncio.to_thread(_interpreter)
    if found is None:
        pytest.skip("no Python here that another user can run with our packages")
    python, paths = found
    running = []
    for user in ("nobody", "root"):
        home = shared / f"home-{user}"
        await asyncio.to_thread(subprocess.run, ["install", "-d", "-m", "700", "-o", user, str(home)], check=True)
        environment = {"HOME": str(home), "PYTHONPATH": paths, "PATH": os.environ["PATH"]}
        running.append(
            await asyncio.create_subprocess_exec(
                python, "-P", "-c", USE, str(shared), user=user, env=environment, cwd="/", extra_groups=[],
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )
        )  # fmt: skip
    said = [(await process.stdout.readline()).decode() for process in running]
    ended = [await process.communicate(b"\n") for process in running]
    assert said == ["works\n", "works\n"], ended
    assert [process.returncode for process in running] == [0, 0]
