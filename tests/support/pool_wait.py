"""Waiting for something that no event tells."""

import asyncio


async def eventually(condition, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is anything, so there is nothing to wait on
            await asyncio.sleep(0.005)
