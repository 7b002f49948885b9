"""Files in and out of a slot: exact, streamed, and never a way out of it on either side."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.errors import SandboxFileError
from sandbox_pool.spec import SandboxSpec
from support.slot_server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("size", [0, 1, 32768, 32769, 65527, 65528, 65536, 1 << 20, (1 << 20) + 1, 9_999_999])
async def test_a_file_comes_back_as_it_was_written(sandbox: Sandbox, size: int) -> None:
    data = os.urandom(size)
    await sandbox.write_file("dir/with space/file", data)
    assert await sandbox.read_file("dir/with space/file") == data
    assert (await sandbox.exec("stat -c %s 'dir/with space/file'")).output == f"{size}\n"


async def test_a_part_of_a_file(sandbox: Sandbox) -> None:
    await sandbox.write_file("f", b"0123456789")
    assert await sandbox.read_file("f", offset=3, length=4) == b"3456"
    assert await sandbox.read_file("f", offset=8) == b"89"
    assert await sandbox.read_file("f", offset=20) == b""
    assert await sandbox.read_file("f", length=0) == b""


async def test_text_is_written_as_utf8(sandbox: Sandbox) -> None:
    await sandbox.write_file("t", "é\n")
    assert await sandbox.read_file("t") == "é\n".encode()


async def test_writing_keeps_the_mode_unless_one_is_given(sandbox: Sandbox) -> None:
    await sandbox.exec("echo old > s; chmod 751 s")
    await sandbox.write_file("s", b"new")
    found = await sandbox.stat("s")
    assert found is not None
    assert (found.kind, found.mode, found.size) == ("file", 0o751, 3)
    await sandbox.write_file("s", b"new", mode=0o600)
    found = await sandbox.stat("s")
    assert found is not None
    assert found.mode == 0o600


async def test_writing_through_a_link_changes_its_target(sandbox: Sandbox) -> None:
    await sandbox.exec("echo old > target; ln -s target link")
    await sandbox.write_file("link", b"new")
    assert await sandbox.read_file("target") == b"new"
    found = await sandbox.stat("link")
    assert found is not None
    assert found.kind == "symlink"


async def test_a_failed_write_leaves_the_old_content(server: Server) -> None:
    async with server.lease(SandboxSpec(disk_mb=8)) as sandbox:
        await sandbox.write_file("f", b"old")
        with pytest.raises(SandboxFileError) as raised:
            await sandbox.write_file("f", os.urandom(20 << 20))
        assert raised.value.errno == errno.ENOSPC
        assert await sandbox.read_file("f") == b"old"
        assert [name for name, _ in await sandbox.list_dir(".")] == ["f"]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda s: s.read_file("missing"), errno.ENOENT),
        (lambda s: s.read_file("/etc"), errno.EISDIR),
        (lambda s: s.read_file("/dev/zero"), errno.EINVAL),
        (lambda s: s.write_file("/etc", b""), errno.EISDIR),
        (lambda s: s.write_file("/etc/passwd/x", b""), errno.ENOTDIR),
        (lambda s: s.list_dir("missing"), errno.ENOENT),
        (lambda s: s.remove("missing"), errno.ENOENT),
        (lambda s: s.remove("full"), errno.ENOTEMPTY),
        (lambda s: s.download("missing", "/nonexistent/x"), errno.ENOENT),
    ],
)
async def test_a_refused_call_says_why(sandbox: Sandbox, call: object, code: int) -> None:
    await sandbox.exec("mkdir -p full/folder")
    with pytest.raises(SandboxFileError) as raised:
        await call(sandbox)  # type: ignore[operator]
    assert raised.value.errno == code


async def test_reading_a_fifo_does_not_hang(sandbox: Sandbox) -> None:
    await sandbox.exec("mkfifo pipe")
    with pytest.raises(SandboxFileError):
        await sandbox.read_file("pipe")


async def test_stat_and_listing(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir d; echo abc > f; ln -s /etc l; mkfifo p; touch -d @1000000000.5 f")
    entries = dict(await sandbox.list_dir("."))
    assert {name: entry.kind for name, entry in entries.items()} == {
        "d": "dir",
        "f": "file",
        "l": "symlink",
        "p": "other",
    }
    assert entries["f"].size == 4
    assert entries["f"].mtime_ns == 1_000_000_000_500_000_000
    assert await sandbox.stat("nothing") is None
    assert await sandbox.stat("f/below") is None


async def test_remove(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir -p t/a/b e victim; touch t/a/b/f victim/kept; ln -s ../victim t/link; ln -s victim l")
    await sandbox.remove("e")
    await sandbox.remove("t", recursive=True)
    await sandbox.remove("l", recursive=True)
    assert (await sandbox.exec("ls; ls victim")).output == "victim\nkept\n"


def build_tree(root: Path) -> None:
    (root / "a" / "empty").mkdir(parents=True)
    (root / "a" / "data.bin").write_bytes(os.urandom(3_000_000))
    (root / "a" / "script.sh").write_text("#!/bin/sh\n")
    (root / "a" / "script.sh").chmod(0o755)
    (root / "a" / "none").write_bytes(b"")
    (root / "a" / "link").symlink_to("data.bin")
    (root / "a" / "dangling").symlink_to("/no/such/place")
    (root / "a" / "näme with space\n").write_text("odd")
    (root / "ro").mkdir()
    (root / "ro" / "file").write_text("x")
    (root / "ro").chmod(0o555)
    os.utime(root / "a" / "none", ns=(5, 1_234_567_890_123_456_789))


def describe(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        content: object = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        times = info.st_mtime_ns if stat.S_ISREG(info.st_mode) else None
        mode = None if path.is_symlink() else stat.S_IMODE(info.st_mode)
        found[str(path.relative_to(root))] = (mode, times, content)
    return found


async def test_a_tree_survives_the_way_there_and_back(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    build_tree(source)
    await sandbox.upload(source, "deep/tree")
    await sandbox.download("deep/tree", tmp_path / "back")
    assert describe(tmp_path / "back") == describe(source)
    assert (await sandbox.exec("cd deep/tree && ls -A | sort | xargs; a/script.sh && echo ran")).output == "a ro\nran\n"


async def test_a_single_file_goes_where_it_is_told(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1")
    await sandbox.upload(tmp_path / "one", "x/renamed")
    await sandbox.upload(tmp_path / "one", "x/")
    await sandbox.upload(tmp_path / "one", "top")
    assert (await sandbox.exec("cat x/renamed x/one top")).output == "111"
    await sandbox.download("x/renamed", tmp_path / "copy")
    (tmp_path / "into").mkdir()
    await sandbox.download("x/renamed", tmp_path / "into")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "into" / "renamed").read_bytes() == b"1"


async def test_uploading_nothing_fails_before_the_slot_is_touched(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await sandbox.upload(tmp_path / "missing", "x")


async def test_an_upload_that_does_not_fit_says_so(server: Server, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(20 << 20))
    async with server.lease(SandboxSpec(disk_mb=8)) as sandbox:
        with pytest.raises(SandboxFileError) as raised:
            await sandbox.upload(tmp_path / "big", "big")
        assert raised.value.errno == errno.ENOSPC
        assert (await sandbox.exec("echo usable")).output == "usable\n"


async def test_links_in_the_slot_lead_nowhere_on_the_host(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "host-file"
    secret.write_text("host")
    await sandbox.exec(f"mkdir -p {tmp_path}; ln -s {secret} out; ln -s / rootlink")
    with pytest.raises(SandboxFileError):
        await sandbox.read_file("out")
    await sandbox.write_file("out", b"slot")
    await sandbox.write_file(f"rootlink{tmp_path}/other", b"slot")
    assert secret.read_text() == "host"
    assert not (tmp_path / "other").exists()
    with pytest.raises(SandboxFileError):
        await sandbox.read_file("../../../../../../work/main/README.md")


async def test_a_download_follows_no_link_on_this_side(sandbox: Sandbox, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (target / "d").symlink_to(victim)
    await sandbox.exec("mkdir -p t/d; echo evil > t/d/f")
    await sandbox.download("t", target)
    assert list(victim.iterdir()) == []
    assert (target / "d" / "f").read_text() == "evil\n"


async def test_upload_replaces_links_instead_of_writing_through_them(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "f").write_text("new")
    await sandbox.exec("mkdir d; echo kept > other; ln -s ../other d/f")
    await sandbox.upload(tmp_path / "src", "d")
    assert (await sandbox.exec("cat other d/f")).output == "kept\nnew"


async def test_a_hundred_megabytes_are_exact_both_ways(sandbox: Sandbox, tmp_path: Path) -> None:
    block = os.urandom(1 << 20)
    (tmp_path / "big").write_bytes(b"".join(bytes([i]) + block for i in range(100)))
    await sandbox.upload(tmp_path / "big", "big")
    await sandbox.download("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "big").read_bytes()
