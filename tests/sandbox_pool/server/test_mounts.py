"""Folders of the host in slots, and the environment of a login shell."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from pydantic import ValidationError

from sandbox_pool.errors import SandboxError
from sandbox_pool.spec import Mount, SandboxSpec
from support.slot_server import NOBODY, Server, running_server

pytestmark = pytest.mark.asyncio(loop_scope="module")
LEVELS = (
    ["namespaces-root", "namespaces-rootless", "namespaces-nouser"] if os.geteuid() == 0 else ["namespaces-rootless"]
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEVELS)
async def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    user = NOBODY if os.geteuid() == 0 and request.param == "namespaces-rootless" else None
    python = shutil.which("python3", path="/usr/bin:/bin") if user else None
    kept = tmp_path_factory.mktemp("kept")
    try:
        options = {} if python is None else {"python": python}
        async with running_server("--level", request.param, "--keep-out", str(kept), user=user, **options) as running:
            running.directory.joinpath("kept").write_text(str(kept))
            yield running
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def folder(server: Server) -> Iterator[Path]:
    """A folder of the user the server runs as, with a file and a folder in it."""
    path = Path("/tmp") / f"hrl-mount-{os.getpid()}"
    (path / "inner").mkdir(parents=True)
    (path / "file").write_text("of the host\n")
    owner = server.directory.stat().st_uid
    for made in (path, path / "inner", path / "file"):
        os.chown(made, owner, -1)
    yield path
    shutil.rmtree(path)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def spec_with(*mounts: Mount, **more: object) -> SandboxSpec:
    return SandboxSpec(mounts=mounts, **more)  # type: ignore[arg-type]


async def test_a_folder_is_read_only_unless_asked_otherwise(server: Server, folder: Path) -> None:
    mounts = (
        Mount(source=str(folder), target="/data/set"),
        Mount(source=f"{folder}/inner", target="/out", read_only=False),
    )
    async with server.lease(spec_with(*mounts)) as slot:
        assert (await slot.exec("cat /data/set/file; ls -A /out")).output == "of the host\n"
        for change in (
            "echo x >/data/set/new",
            "rm /data/set/file",
            "chmod 777 /data/set/file",
            "touch /data/set/inner/x",
        ):
            assert "Read-only file system" in (await slot.exec(change)).output
        assert (await slot.exec("echo result >/out/file && cat /out/file")).output == "result\n"
    assert (folder / "inner" / "file").read_text() == "result\n"
    assert names(folder) == ["file", "inner"]


async def test_a_file_can_be_mounted_over_one_of_the_root(server: Server, folder: Path) -> None:
    for target in ("/etc/hostname", "/opt/new/place"):
        async with server.lease(spec_with(Mount(source=f"{folder}/file", target=target))) as slot:
            assert (await slot.exec(f"cat {target}")).output == "of the host\n"


async def test_a_slot_with_mounts_is_reset_and_forked_like_any_other(server: Server, folder: Path) -> None:
    spec = spec_with(Mount(source=str(folder), target="/data"))
    async with server.lease(spec) as slot:
        await slot.exec("echo kept >note")
        snapshot = await slot.snapshot()
    async with server.lease(spec, snapshot=snapshot) as fork:
        assert (await fork.exec("cat note /data/file")).output == "kept\nof the host\n"
    async with server.lease(spec) as slot:
        assert (await slot.exec("ls -A; cat /data/file")).output == "of the host\n"
    async with server.lease(SandboxSpec()) as slot:
        assert (await slot.exec("ls /data")).exit_code != 0
    await server.client.drop_snapshot(snapshot)


async def test_a_mount_gives_no_way_around_it(server: Server, folder: Path) -> None:
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "up").symlink_to(f"{folder.parent}")
    async with server.lease(spec_with(Mount(source=f"{folder}/inner", target="/data"))) as slot:
        for way in (
            "mount -o remount,rw,bind /data",
            "umount /data",
            "rmdir /data",
            "mv /data /elsewhere",
            "cat /data/../file",
            f"ls {folder}",
        ):
            assert (await slot.exec(way)).exit_code != 0, way
        assert "workspace" in (await slot.exec("cd -P /data/.. && ls")).output
        flags = (await slot.exec("grep ' /data ' /proc/self/mountinfo")).output.split()[5].split(",")
        assert {"ro", "nosuid", "nodev"} <= set(flags)


async def test_no_link_on_the_way_to_the_place_in_the_slot_is_followed(server: Server, folder: Path) -> None:
    async with server.lease() as slot:
        await slot.exec(f"ln -s {folder} /trap; mkdir /real")
        snapshot = await slot.snapshot()
    for target in ("/trap/inner", "/trap"):
        with pytest.raises(SandboxError, match="symbolic links"):
            async with server.lease(spec_with(Mount(source=f"{folder}/file", target=target)), snapshot=snapshot):
                pass
    assert names(folder / "inner") == []
    await server.client.drop_snapshot(snapshot)


async def test_what_is_the_pools_or_the_systems_is_refused(server: Server, folder: Path) -> None:
    kept = Path(server.directory.joinpath("kept").read_text())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
    os.mkfifo(folder / "fifo")
    (folder / "to-root").symlink_to("/")
    (folder / "to-proc").symlink_to("/proc/1")
    refused = [
        *("/", "/proc", "/proc/1", "/sys", "/dev", "/dev/shm", "/run", "/var/run", "/var"),
        *(folder / name for name in ("socket", "fifo", "to-root", "to-proc", "missing")),
        *(kept, kept.parent, server.directory / "scratch", server.directory, server.directory / "scratch" / "layers"),
    ]
    for source in refused:
        with pytest.raises(SandboxError, match="cannot be mounted") as error:
            async with server.lease(spec_with(Mount(source=str(source), target="/data"))):
                pass
        assert "\n" not in str(error.value)


async def test_levels_without_a_root_of_their_own_refuse_mounts() -> None:
    async with running_server("--level", "plain") as running:
        with pytest.raises(SandboxError, match="root of their own"):
            await running.client.lease(0, task_id="t", spec=spec_with(Mount(source="/usr", target="/data")))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("relative", "/x"),
        ("/a/../b", "/x"),
        ("/usr", "x"),
        ("/usr", "/"),
        ("/usr", "/proc/x"),
        ("/usr", "/dev"),
        ("/usr", "/x/.."),
    ],
)
async def test_a_mount_that_makes_no_sense_is_refused_at_once(source: str, target: str) -> None:
    with pytest.raises(ValidationError):
        Mount(source=source, target=target)


PROFILE = """
export FROM_PROFILE="of $HOME" PATH="/opt/tool/bin:$PATH"
helper() { echo "helper of the profile"; }
false
"""


@pytest.fixture
def profile(folder: Path) -> Mount:
    if not Path("/etc/profile.d").is_dir():
        pytest.skip("this machine's /etc/profile reads no /etc/profile.d")
    (folder / "profile.sh").write_text(PROFILE)
    return Mount(source=f"{folder}/profile.sh", target="/etc/profile.d/zz-test.sh")


async def test_login_keeps_the_environment_of_the_profile(server: Server, profile: Mount) -> None:
    spec = spec_with(profile, login=True, env={"MINE": "1", "FROM_SPEC": "yes"})
    async with server.lease(spec) as slot:
        shown = await slot.exec('echo "$FROM_PROFILE $MINE"; helper; echo $PATH')
        assert shown.output.startswith("of /root 1\nhelper of the profile\n/opt/tool/bin:")
        process = await slot.spawn("echo $FROM_PROFILE")
        await process.wait()
        assert (await process.log()).data == "of /root\n"
    async with server.lease(spec_with(profile)) as slot:
        assert (await slot.exec("echo [$FROM_PROFILE]")).output == "[]\n"


async def test_what_the_spec_sets_comes_before_the_profile(server: Server, profile: Mount) -> None:
    async with server.lease(spec_with(profile, login=True, env={"FROM_PROFILE": "spec"})) as slot:
        assert (await slot.exec("echo $FROM_PROFILE")).output == "spec\n"


async def test_a_fork_does_not_source_what_an_agent_wrote(server: Server, profile: Mount) -> None:
    spec = spec_with(profile, login=True)
    async with server.lease(spec) as slot:
        await slot.exec("echo 'python3() { echo faked; }' | tee -a /etc/profile ~/.profile ~/.bash_profile")
        snapshot = await slot.snapshot()
    async with server.lease(spec, snapshot=snapshot) as fork:
        assert (await fork.exec("type -t python3; helper")).output == "file\nhelper of the profile\n"
    await server.client.drop_snapshot(snapshot)


async def test_a_profile_that_does_not_end_or_fails_is_told(server: Server, folder: Path, profile: Mount) -> None:
    (folder / "profile.sh").write_text("echo no licence; exit 3\n")
    with pytest.raises(SandboxError, match="the profile ended with exit code 3: no licence"):
        async with server.lease(spec_with(profile, login=True, pids=300)):
            pass
