"""Who may talk to a slot server, and what a repeated or late request does."""

from __future__ import annotations

import asyncio
import secrets

from sandbox_pool.conformance.check import check, expect, expect_equal, expect_error
from sandbox_pool.conformance.context import CheckContext
from sandbox_pool.errors import ProtocolError, SandboxError, SandboxLost, StaleLease


@check()
async def a_wrong_token_is_refused(ctx: CheckContext) -> None:
    """A client without the host's token gets nothing."""
    with expect_error(ProtocolError):
        await ctx.connect(token="wrong-" + secrets.token_hex(8))


@check()
async def an_empty_token_is_refused(ctx: CheckContext) -> None:
    """A client with an empty token gets nothing."""
    with expect_error(ProtocolError):
        await ctx.connect(token="")


@check()
async def version_and_identity_are_told(ctx: CheckContext) -> None:
    """The server tells its protocol version, its identity, its slots and its isolation with the reason."""
    info = ctx.info
    expect(info.protocol >= 1, f"protocol is {info.protocol}")
    expect(info.slots >= 1 and info.host_id and info.server_version, f"incomplete: {info}")
    expect(bool(info.isolation), "the isolation is not told")


@check()
async def health_is_told(ctx: CheckContext) -> None:
    """The server tells its scratch space and how long it is up."""
    client = await ctx.connect()
    try:
        health = await client.health()
    finally:
        await client.close()
    expect(0 <= health.scratch_free_mb <= health.scratch_total_mb, f"scratch: {health}")
    expect(health.uptime_s > 0, f"uptime: {health}")


@check()
async def a_repeated_request_runs_nothing_twice(ctx: CheckContext) -> None:
    """The same request id again returns the recorded outcome and runs nothing."""
    request_id = secrets.token_hex(8)
    async with ctx.lease() as box:
        first = await box.exec("echo $RANDOM$RANDOM; echo x >> runs", request_id=request_id)
        second = await box.exec("echo $RANDOM$RANDOM; echo x >> runs", request_id=request_id)
        runs = await box.exec("wc -l < runs")
    expect_equal(second.output, first.output, "the repeated outcome")
    expect_equal(runs.output.strip(), "1", "times it ran")


@check()
async def a_repeat_while_it_runs_waits_for_the_same_outcome(ctx: CheckContext) -> None:
    """The same request id while the command still runs waits for that command."""
    request_id = secrets.token_hex(8)
    async with ctx.lease() as box:
        results = await asyncio.gather(
            *(box.exec("sleep 0.5; echo x >> runs; echo $$", request_id=request_id) for _ in range(3))
        )
        runs = await box.exec("wc -l < runs")
    expect_equal(len({result.output for result in results}), 1, "different outcomes")
    expect_equal(runs.output.strip(), "1", "times it ran")


@check()
async def a_stale_epoch_is_refused(ctx: CheckContext) -> None:
    """A former holder with its old epoch is refused by the server itself, over any connection."""
    old = await ctx.lease()
    slot, epoch, spec = old.slot, old.epoch, old.spec
    client = await ctx.connect()
    await old.release()
    try:
        with expect_error(StaleLease, SandboxLost):
            await client.sandbox(slot, epoch, task_id="stale", spec=spec).exec("echo hi")
        with expect_error(SandboxError):
            await client.release(slot, epoch)
    finally:
        await client.close()


@check()
async def an_epoch_that_never_was_is_refused(ctx: CheckContext) -> None:
    """A guessed epoch is refused."""
    client = await ctx.connect()
    async with ctx.lease() as box:
        try:
            with expect_error(StaleLease, SandboxLost):
                await client.sandbox(box.slot, box.epoch + 1, task_id="guess", spec=box.spec).exec("echo hi")
        finally:
            await client.close()


@check()
async def a_leased_slot_is_not_leased_again(ctx: CheckContext) -> None:
    """The server refuses to lease a slot that is leased."""
    client = await ctx.connect()
    async with ctx.lease() as box:
        try:
            with expect_error(SandboxError):
                await client.lease(box.slot, task_id="thief", spec=box.spec)
            states = {state.slot: state for state in await client.slots()}
            expect_equal((states[box.slot].state, states[box.slot].epoch), ("leased", box.epoch))
            expect_equal((await box.exec("echo mine")).output, "mine\n", "the holder's output")
        finally:
            await client.close()


@check()
async def a_slot_that_does_not_exist_is_refused(ctx: CheckContext) -> None:
    """A slot number out of range is an error, not a crash."""
    client = await ctx.connect()
    try:
        for slot in (-1, ctx.info.slots, 10**9):
            with expect_error(SandboxError):
                await client.lease(slot, task_id="nowhere", spec=ctx.pool.config.spec)
        expect_equal(len(await client.slots()), ctx.info.slots, "slots")
    finally:
        await client.close()


@check()
async def two_clients_share_a_lease(ctx: CheckContext) -> None:
    """A lease can be used over a second connection with its epoch."""
    client = await ctx.connect()
    async with ctx.lease() as box:
        try:
            other = client.sandbox(box.slot, box.epoch, task_id=box.task_id, spec=box.spec)
            await box.exec("export SHARED=1")
            expect_equal((await other.exec("echo $SHARED")).output, "1\n", "output over the second connection")
        finally:
            await client.close()


@check()
async def a_dropped_connection_leaves_the_lease(ctx: CheckContext) -> None:
    """A connection that drops does not free the lease: the holder goes on over another."""
    async with ctx.lease() as box:
        client = await ctx.connect()
        other = client.sandbox(box.slot, box.epoch, task_id=box.task_id, spec=box.spec)
        await other.exec("echo kept > f")
        await client.close()
        expect_equal((await box.exec("cat f")).output, "kept\n", "the file")
