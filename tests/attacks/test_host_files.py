"""Attacks on the files of the host that a slot's root is made of."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.slot_server import NOBODY, Server

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can put files into the host's folders"),
]

MARK = f"hermes-attack-{uuid.uuid4().hex[:12]}"
FOLDERS = ("/usr/share", "/usr/local/share", "/usr/lib", "/opt", "/etc", "/var/lib", "/var/lib/dpkg", "/var/cache")


def is_namespaces(server: Server) -> bool:
    return server.client.info.isolation == "namespaces"


def put(folder: str, name: str, mode: int, owner: int = 0) -> Path:
    """A file that says its own path, deep inside a folder of its own."""
    path = Path(folder) / f"{MARK}-{name}" / "/".join("d" * 11) / "secret"
    path.parent.mkdir(parents=True)
    path.write_text(f"secret of {path}\n")
    path.chmod(mode)
    os.chown(path, owner, owner)
    return path


def clear(*names: str) -> None:
    for folder in (*FOLDERS, "/"):
        for found in [each for name in names for each in Path(folder).glob(f"{MARK}-{name}")]:
            shutil.rmtree(found) if found.is_dir() else found.unlink()


@pytest.fixture(scope="module", autouse=True)
def early() -> Iterator[list[Path]]:
    """Files that were there before the server started: of root, and of the user that ordinary servers run as."""
    try:
        yield [
            *(put(folder, "early", 0o600) for folder in FOLDERS),
            *(put(folder, "own", 0o600, NOBODY) for folder in ("/opt", "/usr/local/share")),
        ]
    finally:
        clear("early", "own")


def owner_of(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


async def readable(server: Server, paths: list[Path]) -> str:
    """What a slot can read of these, by every way it might try."""
    if not is_namespaces(server) and owner_of(server.process.pid) == NOBODY:
        pytest.skip("commands are the server's user there, and may read what it may (SECURITY.md)")
    async with server.lease() as agent:
        ways = [way for path in paths for way in (f"{path}", f"/proc/1/root{path}", f"/proc/self/root{path}")]
        await agent.exec(f"chmod -R a+rX /opt /etc /usr/share/{MARK}* 2>/dev/null", timeout_s=60)
        result = await agent.exec(f"cat {' '.join(ways)} 2>/dev/null; grep -rs {MARK} /opt /etc /var", timeout_s=60)
        return result.output


async def test_private_files_of_the_host_cannot_be_read(server: Server, early: list[Path]) -> None:
    assert "secret of" not in await readable(server, early)


async def test_files_made_on_the_host_after_the_start_cannot_be_read(server: Server) -> None:
    """Private ones nowhere; others only where programs and libraries are."""
    try:
        late = [put(folder, "late", 0o600) for folder in FOLDERS]
        if is_namespaces(server):
            late += [put(folder, "open", 0o644) for folder in ("/", "/etc", "/var/lib", "/var/cache")]
        assert "secret of" not in await readable(server, late)
    finally:
        clear("late", "open")


def put_open(path: str) -> Path:
    Path(path).write_text(f"secret of {path}\n")
    return Path(path)


def close(path: Path) -> Path:
    """Only the user whom ordinary servers run as may read it from now on."""
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o600)
    return path


async def test_late_private_files_of_the_servers_own_user_cannot_be_read(server: Server) -> None:
    """Made, moved there, or made private; also below a folder that came with them. The slot was built before them."""
    try:
        closed = put_open(f"/usr/local/share/{MARK}-closed")
        async with server.lease() as agent:
            assert (await agent.exec(f"cat {closed}")).output.startswith("secret of")
        late = [put(folder, "mine", 0o600, NOBODY) for folder in ("/opt", "/usr/local/share", "/usr/share", "/usr/lib")]
        moved = put("/var/lib", "mine", 0o600, NOBODY).rename(f"/opt/{MARK}-moved")
        assert "secret of" not in await readable(server, [*late, moved, close(closed)])
    finally:
        clear("mine", "moved", "closed")


async def test_the_root_of_a_slot_is_not_the_hosts(server: Server) -> None:
    if not is_namespaces(server):
        pytest.skip("slots have no root of their own at this level")
    async with server.lease() as agent:
        shown = set((await agent.exec("ls -A /")).output.split())
        known = "bin dev etc home lib lib32 lib64 libx32 media mnt opt proc root run sbin srv sys tmp usr var"
        assert shown <= {*known.split(), "workspace"}
        assert (await agent.exec("cat /etc/shadow /etc/gshadow 2>/dev/null")).output == ""
        if server.client.info.variant != "rootless":
            assert (await agent.exec("echo x >> /etc/passwd && rm /usr/bin/env && echo done")).output == "done\n"
