"""Snapshot and fork: many tasks from one prepared state."""

from __future__ import annotations

import asyncio

from sandbox_pool.conformance.check import IS_ALIVE, check, expect, expect_equal, expect_error
from sandbox_pool.conformance.context import CheckContext
from sandbox_pool.errors import SandboxError
from sandbox_pool.spec import SandboxSpec


@check()
async def a_fork_has_the_files(ctx: CheckContext) -> None:
    """A fork starts with the files of the snapshot: contents, modes, symlinks, deletions."""
    async with ctx.lease() as box:
        await box.exec(
            "mkdir -p d/e; printf '\\0bin' > d/e/f; echo run > r; chmod 750 r; ln -s d/e/f link; touch no; rm no"
        )
        snapshot = await box.snapshot()
        async with ctx.pool.lease_from(snapshot, "fork") as fork:
            result = await fork.exec("cat link | od -An -c | tr -d ' \\n'; stat -c %a r; ls | tr '\\n' ' '")
        await ctx.pool.drop_snapshot(snapshot)
    expect_equal(result.output.split(), ["\\0bin750", "d", "link", "r"], "what the fork has")


@check()
async def forks_do_not_touch_each_other(ctx: CheckContext) -> None:
    """Forks and the original go their own ways from the snapshot on."""
    async with ctx.lease() as box:
        await box.exec("echo base > f")
        snapshot = await box.snapshot()
        await box.exec("echo original > f")
        async with ctx.pool.lease_from(snapshot, "a") as one, ctx.pool.lease_from(snapshot, "b") as other:
            before = (await one.exec("cat f")).output
            await asyncio.gather(one.exec("echo one > f; rm -rf /workspace/x"), other.exec("echo other > f"))
            after = [(await each.exec("cat f")).output for each in (box, one, other)]
        await ctx.pool.drop_snapshot(snapshot)
    expect_equal((before, after), ("base\n", ["original\n", "one\n", "other\n"]))


@check()
async def a_snapshot_outlives_its_lease(ctx: CheckContext) -> None:
    """A snapshot can be used after the lease that made it is over, again and again."""
    async with ctx.lease() as box:
        await box.exec("echo prepared > f")
        snapshot = await box.snapshot()
    for n in range(3):
        async with ctx.pool.lease_from(snapshot, f"fork-{n}") as fork:
            expect_equal((await fork.exec("cat f; echo mine > g; ls")).output, "prepared\nf\ng\n", f"fork {n}")
    await ctx.pool.drop_snapshot(snapshot)


@check("own-pids", "pgrep")
async def processes_are_not_forked(ctx: CheckContext) -> None:
    """A fork has none of the original's processes, and the original's go on."""
    async with ctx.lease() as box:
        await box.exec("sleep 4361 & echo $! > pid")
        snapshot = await box.snapshot()
        async with ctx.pool.lease_from(snapshot, "fork") as fork:
            seen = await fork.exec("pgrep -f '^sleep 4361' | wc -l")
        expect_equal(seen.output.strip(), "0", "processes of the original that the fork sees")
        alive = await box.exec(IS_ALIVE)
        await ctx.pool.drop_snapshot(snapshot)
    expect_equal(alive.output, "alive\n", "the original's process")


@check()
async def the_spec_is_kept(ctx: CheckContext) -> None:
    """A fork has the spec of its original."""
    async with ctx.lease(SandboxSpec(env={"FORKED": "yes"})) as box:
        snapshot = await box.snapshot()
    async with ctx.pool.lease_from(snapshot, "fork") as fork:
        result = await fork.exec("echo $FORKED")
    await ctx.pool.drop_snapshot(snapshot)
    expect_equal(result.output, "yes\n", "output")


@check()
async def a_fork_can_be_forked(ctx: CheckContext) -> None:
    """A snapshot of a fork holds the changes of both."""
    async with ctx.lease() as box:
        await box.exec("echo 1 > one")
        first = await box.snapshot()
    async with ctx.pool.lease_from(first, "second") as box:
        await box.exec("echo 2 > two")
        second = await box.snapshot()
    async with ctx.pool.lease_from(second, "third") as box:
        result = await box.exec("cat one two")
    await ctx.pool.drop_snapshot(first)
    await ctx.pool.drop_snapshot(second)
    expect_equal(result.output, "1\n2\n", "output")


@check()
async def a_fork_is_reset_like_any_slot(ctx: CheckContext) -> None:
    """After a fork is released, the next lease starts empty."""
    async with ctx.lease() as box:
        await box.exec("echo x > left")
        snapshot = await box.snapshot()
    for n in range(4):
        async with ctx.pool.lease_from(snapshot, f"fork-{n}"):
            pass
        async with ctx.lease() as box:
            expect_equal((await box.exec("ls")).output, "", "the workspace")
    await ctx.pool.drop_snapshot(snapshot)


@check()
async def an_unknown_snapshot_is_an_error(ctx: CheckContext) -> None:
    """A snapshot that does not exist, or was dropped, is an error and never an empty slot."""
    with expect_error(SandboxError):
        await ctx.pool.lease_from("no-such-snapshot", "fork")
    async with ctx.lease() as box:
        snapshot = await box.snapshot()
    await ctx.pool.drop_snapshot(snapshot)
    with expect_error(SandboxError):
        await ctx.pool.lease_from(snapshot, "fork")


@check("writable-root")
async def changes_outside_the_workspace_are_kept(ctx: CheckContext) -> None:
    """Changes anywhere in the root, such as an installed program, are in the snapshot."""
    async with ctx.lease() as box:
        await box.exec(
            "mkdir -p /usr/local/bin; cd /usr/local/bin;"
            " echo '#!/bin/sh\necho tool' > hrl-tool; chmod +x hrl-tool; rm -f /etc/issue"
        )
        snapshot = await box.snapshot()
    async with ctx.pool.lease_from(snapshot, "fork") as fork:
        result = await fork.exec("/usr/local/bin/hrl-tool; test -e /etc/issue || echo gone")
    await ctx.pool.drop_snapshot(snapshot)
    expect(result.output.startswith("tool\n"), f"output is {result.output!r}")
    expect_equal(result.output, "tool\ngone\n", "output")
