"""Files and trees between the caller's machine and the slot."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from sandbox_pool.conformance.check import check, expect, expect_equal
from sandbox_pool.conformance.context import CheckContext
from sandbox_pool.errors import SandboxError


@check(timeout_s=120.0)
async def hundred_megabytes_both_ways(ctx: CheckContext) -> None:
    """100 MB go up and come down byte-exact."""
    with tempfile.TemporaryDirectory() as folder:
        source, back = Path(folder) / "big", Path(folder) / "back"
        block = os.urandom(2**20)
        source.write_bytes(b"".join(n.to_bytes(4, "big") + block[4:] for n in range(100)))
        async with ctx.lease() as box:
            await box.upload(source, "big")
            inside = (await box.exec("sha256sum < big", timeout_s=60)).output.split()[0]
            await box.download("big", back)
        expect_equal(inside, hashlib.sha256(source.read_bytes()).hexdigest(), "the sum inside the slot")
        expect(back.read_bytes() == source.read_bytes(), "what came back differs")


@check()
async def trees_go_up(ctx: CheckContext) -> None:
    """A tree goes up with its folders, modes and symlinks."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        (tree / "sub" / "empty").mkdir(parents=True)
        (tree / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (tree / "sub" / "run.sh").chmod(0o755)
        (tree / "link").symlink_to("sub/run.sh")
        async with ctx.lease() as box:
            await box.upload(tree, "copy")
            result = await box.exec("./copy/sub/run.sh; ./copy/link; readlink copy/link; ls copy/sub")
    expect_equal(result.output.split(), ["ran", "ran", "sub/run.sh", "empty", "run.sh"], "the tree inside")


@check()
async def trees_come_down(ctx: CheckContext) -> None:
    """A tree comes down with its folders, modes and contents."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "got"
        async with ctx.lease() as box:
            await box.exec(
                "mkdir -p t/a/empty; printf '\\0\\1' > t/a/bin; echo x > t/run; chmod 755 t/run; ln -s a/bin t/l"
            )
            await box.download("t", target)
        expect_equal((target / "a" / "bin").read_bytes(), b"\0\1", "the binary file")
        expect((target / "a" / "empty").is_dir(), "the empty folder is missing")
        expect((target / "run").stat().st_mode & 0o100, "the executable bit is missing")


@check()
async def a_downloaded_tree_cannot_write_elsewhere(ctx: CheckContext) -> None:
    """A tree full of symlinks that point out never makes the download write outside its target."""
    with tempfile.TemporaryDirectory() as folder:
        outside = Path(folder) / "outside"
        outside.mkdir()
        target = Path(folder) / "got"
        async with ctx.lease() as box:
            await box.exec(
                f"mkdir t; ln -s {outside} t/d; ln -s {outside}/f t/f; ln -s ../../outside t/up; echo x > t/z"
            )
            with contextlib.suppress(SandboxError):
                await box.download("t", target)
        expect_equal(list(outside.iterdir()), [], "files written outside the target")


@check("file-confinement")
async def a_download_does_not_leave_the_slot(ctx: CheckContext) -> None:
    """Downloading a symlink to a host path never yields the host's file."""
    secret = await ctx.host_secret()
    with tempfile.TemporaryDirectory() as folder:
        async with ctx.lease() as box:
            await box.exec(f"ln -s {secret.path} file; ln -s {secret.folder} dir")
            for n, path in enumerate(("file", f"dir/{secret.name}", "dir")):
                try:
                    await box.download(path, Path(folder) / str(n))
                except (SandboxError, OSError):
                    continue
        expect(secret.text not in _all_text(Path(folder)), "the host's secret was downloaded")


@check("file-confinement")
async def an_upload_does_not_follow_the_slots_symlinks(ctx: CheckContext) -> None:
    """Uploading to a path that is a symlink inside never writes to the host."""
    secret = await ctx.host_secret()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / secret.name
        source.write_text("overwritten")
        async with ctx.lease() as box:
            await box.exec(f"ln -s {secret.path} file; ln -s {secret.folder} dir")
            for path in ("file", "dir/", f"dir/{secret.name}"):
                try:
                    await box.upload(source, path)
                except SandboxError:
                    continue
    expect_equal(secret.read(), secret.text, "the host's file")


@check()
async def many_small_files(ctx: CheckContext) -> None:
    """Hundreds of small files go up and come down, none lost."""
    with tempfile.TemporaryDirectory() as folder:
        tree, back = Path(folder) / "many", Path(folder) / "back"
        for n in range(400):
            path = tree / f"{n % 10}" / f"f{n}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(n))
        async with ctx.lease() as box:
            await box.upload(tree, "many")
            inside = (await box.exec("find many -type f | wc -l")).output.strip()
            await box.download("many", back)
        expect_equal(inside, "400", "files inside")
        expect_equal(sum(int(p.read_text()) for p in back.rglob("f*")), sum(range(400)), "sum of the contents")


def _all_text(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return "\n".join(path.read_text(errors="replace") for path in files)
