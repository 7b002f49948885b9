"""Files read, written and listed from outside. Every path is resolved inside the slot, by the slot's own rules."""

from __future__ import annotations

from sandbox_pool.conformance.check import check, expect, expect_equal, expect_error
from sandbox_pool.conformance.context import CheckContext
from sandbox_pool.errors import SandboxFileError

ALL_BYTES = bytes(range(256)) * 16


@check()
async def bytes_round_trip(ctx: CheckContext) -> None:
    """What is written is read back, byte for byte."""
    async with ctx.lease() as box:
        await box.write_file("data.bin", ALL_BYTES)
        expect_equal(await box.read_file("data.bin"), ALL_BYTES, "the file")


@check()
async def commands_and_file_calls_see_the_same_files(ctx: CheckContext) -> None:
    """A file written by either side is there for the other, by relative and absolute path."""
    async with ctx.lease() as box:
        await box.write_file("from_outside", b"1")
        result = await box.exec("cat from_outside; echo 2 > from_inside; pwd")
        inside = result.output[1:].strip()
        expect_equal(await box.read_file("from_inside"), b"2\n", "the file made inside")
        expect_equal(await box.read_file(f"{inside}/from_inside"), b"2\n", "the same by its absolute path")


@check()
async def empty_files(ctx: CheckContext) -> None:
    """Empty files stay empty."""
    async with ctx.lease() as box:
        await box.write_file("empty", b"")
        found = await box.stat("empty")
        expect_equal((await box.read_file("empty"), found and found.size), (b"", 0))


@check()
async def writing_makes_the_folders(ctx: CheckContext) -> None:
    """Writing a file makes the folders above it."""
    async with ctx.lease() as box:
        await box.write_file("a/b/c/file", b"x")
        expect_equal((await box.exec("cat a/b/c/file")).output, "x", "the file")


@check()
async def writing_replaces(ctx: CheckContext) -> None:
    """Writing a shorter file over a longer one leaves nothing of the old."""
    async with ctx.lease() as box:
        await box.write_file("f", b"long content")
        await box.write_file("f", b"new")
        expect_equal(await box.read_file("f"), b"new", "the file")


@check()
async def parts_of_a_file(ctx: CheckContext) -> None:
    """A part of a file can be read by offset and length."""
    async with ctx.lease() as box:
        await box.write_file("f", b"0123456789")
        expect_equal(await box.read_file("f", offset=3, length=4), b"3456", "bytes 3 to 6")
        expect_equal(await box.read_file("f", offset=8, length=100), b"89", "the end")
        expect_equal(await box.read_file("f", offset=50, length=5), b"", "past the end")


@check()
async def names_with_odd_characters(ctx: CheckContext) -> None:
    """Names with spaces, quotes, newlines and non-ASCII letters work."""
    async with ctx.lease() as box:
        for name in ("with space", "quo'te\"s", "new\nline", "ünï-😀", "-dash", "$HOME;rm"):
            await box.write_file(f"odd/{name}", name.encode())
            expect_equal(await box.read_file(f"odd/{name}"), name.encode(), f"the file {name!r}")
        expect_equal((await box.exec("ls odd | wc -l")).output.strip(), "7", "names as ls shows them")


@check()
async def missing_files(ctx: CheckContext) -> None:
    """A missing file is a SandboxFileError with errno 2, not an empty file."""
    async with ctx.lease() as box:
        with expect_error(SandboxFileError):
            await box.read_file("no_such_file")
        expect_equal(await box.stat("no_such_file"), None, "stat of a missing file")


@check()
async def a_folder_is_not_a_file(ctx: CheckContext) -> None:
    """Reading or overwriting a folder is refused."""
    async with ctx.lease() as box:
        await box.exec("mkdir folder")
        with expect_error(SandboxFileError):
            await box.read_file("folder")
        with expect_error(SandboxFileError):
            await box.write_file("folder", b"x")


@check()
async def stat_tells_kind_and_size(ctx: CheckContext) -> None:
    """stat tells files, folders and symlinks apart, without following."""
    async with ctx.lease() as box:
        await box.exec("printf abc > f; mkdir d; ln -s f l; chmod 640 f")
        found = [await box.stat(name) for name in ("f", "d", "l")]
    expect_equal([entry and entry.kind for entry in found], ["file", "dir", "symlink"], "kinds")
    expect_equal([found[0].size, found[0].mode & 0o777] if found[0] else None, [3, 0o640], "size and mode of the file")


@check()
async def folders_are_listed(ctx: CheckContext) -> None:
    """A folder's entries are listed, hidden ones too."""
    async with ctx.lease() as box:
        await box.exec("mkdir -p d/sub; touch d/a d/.hidden")
        entries = await box.list_dir("d")
    expect_equal(sorted(name for name, _ in entries), [".hidden", "a", "sub"], "entries")
    expect_equal({name: stat.kind for name, stat in entries}["sub"], "dir", "kind of the folder")


@check()
async def remove_files_and_trees(ctx: CheckContext) -> None:
    """Files and whole trees can be removed; a symlink goes, not what it points to."""
    async with ctx.lease() as box:
        await box.exec(
            "mkdir -p t/deep; touch t/deep/x keep; ln -s ../keep t/link; mkdir other; touch other/y; ln -s other dl"
        )
        with expect_error(SandboxFileError):
            await box.remove("t")
        await box.remove("t", recursive=True)
        await box.remove("dl", recursive=True)
        left = await box.exec("ls; ls other")
    expect_equal(left.output.split(), ["keep", "other", "y"], "what is left")


@check()
async def executable_bits_survive(ctx: CheckContext) -> None:
    """Overwriting a file keeps its mode, so that scripts stay executable."""
    async with ctx.lease() as box:
        await box.write_file("run.sh", b"#!/bin/sh\necho ran\n")
        await box.exec("chmod +x run.sh")
        await box.write_file("run.sh", b"#!/bin/sh\necho again\n")
        result = await box.exec("./run.sh")
    expect_equal(result.output, "again\n", "output")


@check("file-confinement")
async def reads_do_not_follow_symlinks_out(ctx: CheckContext) -> None:
    """A symlink to a file of the host is resolved inside the slot: no byte of the host's comes back."""
    secret = await ctx.host_secret()
    async with ctx.lease() as box:
        await box.exec(f"ln -s {secret.path} link; ln -s {secret.folder} folder; ln -s /proc/1/root/{secret.path} root")
        for path in ("link", f"folder/{secret.name}", "root", f"../../../../../..{secret.path}"):
            try:
                data = await box.read_file(path)
            except SandboxFileError:
                continue
            expect(secret.text.encode() not in data, f"{path} gave the host's secret")


@check("file-confinement")
async def writes_do_not_follow_symlinks_out(ctx: CheckContext) -> None:
    """Writing through a symlink never changes a file of the host."""
    secret = await ctx.host_secret()
    async with ctx.lease() as box:
        await box.exec(f"ln -s {secret.path} link; ln -s {secret.folder} folder")
        for path in ("link", f"folder/{secret.name}", f"folder/new-{secret.name}"):
            try:
                await box.write_file(path, b"overwritten")
            except SandboxFileError:
                continue
    expect_equal(secret.read(), secret.text, "the host's file")
    expect(not secret.sibling("new-").exists(), "a file was made on the host")


@check("file-confinement")
async def other_calls_do_not_follow_symlinks_out(ctx: CheckContext) -> None:
    """stat, list and remove through a symlink never reach the host."""
    secret = await ctx.host_secret()
    async with ctx.lease() as box:
        await box.exec(f"ln -s {secret.folder} folder")
        for call in (box.remove(f"folder/{secret.name}"), box.remove(secret.path)):
            try:
                await call
            except SandboxFileError:
                continue
        try:
            entries = await box.list_dir("folder")
        except SandboxFileError:
            entries = []
    expect(secret.name not in [name for name, _ in entries], "the host's folder was listed")
    expect_equal(secret.read(), secret.text, "the host's file")


@check("file-confinement")
async def a_symlink_swapped_under_way_does_not_help(ctx: CheckContext) -> None:
    """A process that swaps a folder for a symlink all the time never gets a host file read."""
    secret = await ctx.host_secret()
    async with ctx.lease() as box:
        await box.exec(f"mkdir real; echo mine > real/{secret.name}; ln -s {secret.folder} evil; mkdir swap")
        await box.exec(
            "(while :; do mv -T real swap/d; mv -T evil real; mv -T real evil; mv -T swap/d real; done) 2>/dev/null &"
        )
        for _ in range(60):
            try:
                data = await box.read_file(f"real/{secret.name}")
            except SandboxFileError:
                continue
            expect(secret.text.encode() not in data, "the host's secret was read")
