"""Waiting for something that no event tells."""

import asyncio


async def eventually(condition, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is anything, so there is nothing to wait on
            await asyncio.sleep(0.005)


async def eventually_prints(sandbox, command, output, timeout_s=20.0):
    """Run a command in a slot until it prints this: what was sent to the background starts when it starts."""
    async with asyncio.timeout(timeout_s):
        while (await sandbox.exec(command)).output != output:  # noqa: ASYNC110 - the slot cannot tell
            await asyncio.sleep(0.02)
