"""Waiting for something that no event tells. The limits are for a machine where ten others run as well."""

import asyncio
import inspect
import uuid


async def eventually(condition, timeout_s=60.0):
    """The first true answer of a function, which may be a coroutine function."""
    async with asyncio.timeout(timeout_s):
        while True:
            answer = condition()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return answer
            await asyncio.sleep(0.005)


async def eventually_prints(sandbox, command, output):
    """Run a command in a slot until it prints this: what was sent to the background starts when it starts."""

    async def prints():
        return (await sandbox.exec(command)).output == output

    await eventually(prints)


async def started(sandbox, command):
    """Start a command in a slot and wait until it runs; the task that waits for its end."""
    mark = f"started-{uuid.uuid4().hex}"
    running = asyncio.create_task(sandbox.exec(f"touch {mark}; {command}"))
    await eventually(lambda: running.done() or sandbox.stat(mark))
    return running
