"""A crowd that is ready at once is spread over iterations of the event loop; nobody is lost or starved."""

import asyncio

from agent_loop import HermesAgentLoop
from agent_loop.fairness import AT_ONCE, wait_in_line
from support.loop_servers import ScriptedServer, says, user


async def play(count):
    """Let `count` tasks wait in line at once: in which iteration of the loop each of them went on."""
    loop = asyncio.get_running_loop()
    iteration = 0
    running = True

    def tick():
        nonlocal iteration
        iteration += 1
        if running:
            loop.call_soon(tick)

    async def worker():
        await wait_in_line()
        return iteration

    loop.call_soon(tick)
    seen = await asyncio.gather(*(worker() for _ in range(count)))
    running = False
    return seen


async def test_a_crowd_is_spread_over_iterations_first_come_first_served():
    seen = await play(50)
    assert seen == sorted(seen)
    assert max(seen.count(iteration) for iteration in set(seen)) <= AT_ONCE


async def test_a_few_never_wait():
    assert len(set(await play(AT_ONCE))) == 1


async def test_a_cancelled_rollout_gives_its_place_to_the_next():
    async def worker(number, passed):
        await wait_in_line()
        passed.append(number)

    passed = []
    tasks = [asyncio.create_task(worker(number, passed)) for number in range(20)]
    await asyncio.sleep(0)
    for task in tasks[AT_ONCE : AT_ONCE + 8]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert passed == [*range(AT_ONCE), *range(AT_ONCE + 8, 20)]
    assert len(set(await play(AT_ONCE))) == 1


async def test_rollouts_that_start_at_once_are_spread_too():
    loop = asyncio.get_running_loop()
    iteration, began = 0, []

    def tick():
        nonlocal iteration
        iteration += 1
        if len(began) < 40:
            loop.call_soon(tick)

    def answer(_):
        began.append(iteration)
        return says("done")

    loop.call_soon(tick)
    server = ScriptedServer(answer, repeat=True)
    await asyncio.gather(*(HermesAgentLoop(server).run(user()) for _ in range(40)))
    assert len(began) == 40
    assert max(began.count(iteration) for iteration in set(began)) <= AT_ONCE


def test_event_loops_have_lines_of_their_own():
    for _ in range(3):
        assert len(asyncio.run(play(30))) == 30
