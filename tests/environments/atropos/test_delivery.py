"""Delivery to a real run-api: taken exactly once, through refusals, restarts and lost answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from environments.atropos.api import ApiGone, ApiLink, ApiLost, ApiRefused, RolloutApi
from environments.atropos.outbox import Outbox
from environments.atropos.stops import Stop
from support.atropos_api import RunApi, Trainer, free_port
from support.atropos_envs import numbered_group

REQUEST = {"max_token_length": 4096, "desired_name": "t", "weight": 1.0, "group_size": 4}


@asynccontextmanager
async def linked(url: str, wait_s: float = 30.0) -> AsyncIterator[ApiLink]:
    async with RolloutApi(url, send_timeout_s=5.0) as client:
        link = ApiLink(client, REQUEST, Stop(), wait_s=wait_s, poll_s=0.05)
        await link.register()
        yield link


async def test_groups_reach_the_trainer_unchanged(api: RunApi) -> None:
    trainer = Trainer(api.url)
    await asyncio.to_thread(trainer.register)
    async with linked(api.url) as link, Outbox(link) as outbox:
        for number in (1, 2):
            await outbox.put(numbered_group(number))
        await outbox.drain(10)
        assert outbox.delivery.groups == 2
        assert outbox.delivery.trained_tokens == 2 * 4 * 4
    [batch] = await asyncio.to_thread(trainer.pull_until, 1)
    for group, number in zip(batch, (1, 2), strict=True):
        sent = numbered_group(number)
        assert {key: group[key] for key in sent} == sent
        assert group["env_id"] == link.registration.env_id


async def test_registration_waits_for_the_trainer(api: RunApi) -> None:
    async with RolloutApi(api.url) as client:
        link = ApiLink(client, REQUEST, Stop(), poll_s=0.02)
        registering = asyncio.create_task(link.register())
        await asyncio.sleep(0.2)
        assert not registering.done()
        await asyncio.to_thread(Trainer(api.url).register)
        assert (await registering).name == "t_0"


async def test_a_name_is_required_by_run_api_and_refusal_is_an_error(api: RunApi) -> None:
    async with RolloutApi(api.url) as client:
        with pytest.raises(ApiRefused, match="422"):
            await client.register_env({**REQUEST, "desired_name": None})


async def test_a_refused_group_is_counted_and_does_not_stop_the_next(api: RunApi) -> None:
    await asyncio.to_thread(Trainer(api.url).register)
    async with linked(api.url) as link, Outbox(link) as outbox:
        await outbox.put(numbered_group(1, messages=[[{"role": "user"}]] * 4))
        await outbox.put(numbered_group(2))
        await outbox.drain(10)
        assert (outbox.delivery.refused, outbox.delivery.groups) == (1, 1)


async def test_a_killed_run_api_is_found_again_and_nothing_in_hand_is_lost_or_doubled(mortal_api: RunApi) -> None:
    trainer = Trainer(mortal_api.url)
    await asyncio.to_thread(trainer.register)
    async with linked(mortal_api.url) as link, Outbox(link) as outbox:
        await outbox.put(numbered_group(1))
        await outbox.drain(10)
        mortal_api.kill()
        for number in (2, 3, 4):
            await outbox.put(numbered_group(number))
        await asyncio.sleep(0.3)
        assert outbox.unsent == 3
        await asyncio.to_thread(mortal_api.start)
        await asyncio.sleep(0.5)
        assert outbox.unsent == 3, "a run-api without a trainer must not be sent anything"
        await asyncio.to_thread(trainer.register)
        await outbox.drain(20)
        assert outbox.delivery.groups == 4
        assert link.epoch == 2
        await outbox.put(numbered_group(5))
        await outbox.drain(10)
    batches = await asyncio.to_thread(trainer.pull_until, 2)
    assert sorted(group["tokens"][0][0] for batch in batches for group in batch) == [2, 3, 4, 5]


async def test_waiting_for_run_api_has_a_limit(mortal_api: RunApi) -> None:
    await asyncio.to_thread(Trainer(mortal_api.url).register)
    async with linked(mortal_api.url, wait_s=0.3) as link:
        mortal_api.kill()
        with pytest.raises(ApiLost, match="did not come back"):
            await link.status()


async def test_what_stops_the_sender_reaches_whoever_puts(mortal_api: RunApi) -> None:
    await asyncio.to_thread(Trainer(mortal_api.url).register)
    async with linked(mortal_api.url, wait_s=0.2) as link, Outbox(link, capacity=1) as outbox:
        mortal_api.kill()
        await outbox.put(numbered_group(1))
        await outbox.put(numbered_group(2))
        with pytest.raises(ApiLost):
            await outbox.put(numbered_group(3))


async def test_nobody_listening_is_told_from_a_host_that_does_not_answer() -> None:
    async with RolloutApi(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(ApiGone):
            await client.trainer_info()


class FlakyApi:
    """Speaks run-api's protocol, and loses answers: takes the group (or not) and hangs up."""

    def __init__(self, take: bool, show_latest: bool = True) -> None:
        self.take, self.show_latest = take, show_latest
        self.losses = 1
        self.taken: list[str] = []
        self.posts = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/register-env":
            keys = {"starting_step": 0, "checkpoint_dir": "", "checkpoint_interval": 0, "num_steps": 1}
            return web.json_response({"status": "success", "env_id": 0, "wandb_name": "t_0", **keys})
        if request.path == "/status-env":
            return web.json_response({"current_step": 0, "queue_size": 0})
        if request.path == "/latest_example":
            last = self.taken[-1] if self.taken and self.show_latest else "somebody-else"
            return web.json_response(
                {"generation_params": {"group_id": last} if self.taken or not self.show_latest else []}
            )
        group_id = (await request.json())["generation_params"]["group_id"]
        self.posts += 1
        lose, self.losses = self.losses > 0, self.losses - 1
        if self.take or not lose:
            self.taken.append(group_id)
        if lose:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"status": "received"})


@asynccontextmanager
async def flaky(fake: FlakyApi) -> AsyncIterator[Outbox]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with linked(f"http://127.0.0.1:{port}") as link, Outbox(link) as outbox:
            yield outbox
    finally:
        await runner.cleanup()


async def test_an_answer_lost_after_the_group_was_taken_is_not_sent_twice() -> None:
    fake = FlakyApi(take=True)
    async with flaky(fake) as outbox:
        await outbox.put(numbered_group(1))
        await outbox.drain(10)
        assert fake.taken == ["g1"]
        assert outbox.delivery.groups == 1


async def test_a_group_lost_before_it_was_taken_is_sent_again() -> None:
    fake = FlakyApi(take=False)
    async with flaky(fake) as outbox:
        await outbox.put(numbered_group(1))
        await outbox.drain(10)
        assert (fake.taken, fake.posts) == (["g1"], 2)


async def test_when_run_api_cannot_tell_the_group_is_counted_and_never_doubled() -> None:
    fake = FlakyApi(take=True, show_latest=False)
    async with flaky(fake) as outbox:
        await outbox.put(numbered_group(1))
        await outbox.drain(10)
        assert (fake.posts, outbox.delivery.uncertain, outbox.delivery.groups) == (1, 1, 0)


async def test_status_of_an_unknown_environment_registers_again(mortal_api: RunApi) -> None:
    await asyncio.to_thread(Trainer(mortal_api.url).register)
    async with linked(mortal_api.url) as link:
        mortal_api.kill()
        mortal_api.start()
        await asyncio.to_thread(Trainer(mortal_api.url).register)
        assert (await link.status()).queue_size == 0
        assert link.epoch == 2
