"""Two trials for every provider: all promises of a slot, and 200 leases while what hosts run in is killed."""

import asyncio
import random
from collections import Counter

from sandbox_pool import SandboxLost, SlotPool
from sandbox_pool.conformance import all_checks, run_checks
from sandbox_pool.conformance.runner import make_context

LEASES = 200
STRIKES = 8
COMMANDS = ("echo hi", "sleep 0.2; echo hi", "head -c 2000000 /dev/urandom | wc -c", "seq 100000 | tail -1")


async def promises(config):
    """How many promises were kept, and id and detail of each that was not; every check says something."""
    async with SlotPool.from_config(config) as pool:
        context = await make_context(pool)
        results = [result async for result in run_checks(all_checks(), context)]
        context.close()
    assert len(results) == len(all_checks())
    verdicts = Counter(each.verdict for each in results)
    print(f"{config.provider} at {context.info.isolation}: {dict(verdicts)}")
    return verdicts["passed"], {each.id: each.detail for each in results if each.verdict == "failed"}


async def random_leases(config, strike):
    """Leases of random tasks, each done or lost. `strike(chance)` kills something now and then; False: nothing to."""
    # Kills may meet one start after the other: they are not what makes a start impossible.
    config = config.model_copy(update={"start_attempts": STRIKES + 1})
    chance = random.Random(20)
    todo, ends = iter(range(LEASES)), Counter()

    async def work(pool):
        for number in todo:
            try:
                async with pool.lease(f"t{number}") as box:
                    for command in chance.choices(COMMANDS, k=3):
                        result = await box.exec(command, timeout_s=120)
                        assert (result.exit_code, result.timed_out) == (0, False)
                    ends["done"] += 1
            except SandboxLost:
                ends["lost"] += 1

    async with SlotPool.from_config(config) as pool:
        working = [asyncio.create_task(work(pool)) for _ in range(8)]
        struck = 0
        while not all(task.done() for task in working):
            await asyncio.wait(working, timeout=chance.uniform(1, 4))
            if struck < STRIKES:
                struck += bool(await strike(chance))
        await asyncio.gather(*working)
    print(f"{config.provider}: {dict(ends)} under {struck} kills")
    assert ends.total() == LEASES
    assert struck > 0
    assert ends["done"] > 0
    assert ends["lost"] > 0
