"""`Rollouts`, `Sample`, `BlockingRollouts` and `ToolSession`: what other trainers are built on."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.local_models.standin import PolicyRequest, StandIn, chatml_tokenizer
from agent_loop.local_models.standin.policies import call
from agent_loop.model.backends.vllm import VllmBackend
from agent_loop.records.record import RolloutRecord
from environments.base import SandboxContext, Score, ServerConfig
from environments.errors import ConfigError, RolloutLost
from environments.rollouts import rollouts as module
from environments.rollouts.blocking import BlockingRollouts
from environments.rollouts.rollouts import Rollouts
from environments.rollouts.tool_session import NoModel, ToolSession
from sandbox_pool.errors import AcquireTimeout, SandboxLost
from support.env_pool import DirectoryPool
from support.env_tasks import NumberEnv, right, sometimes_right, standin_model

ITEM = {"id": "x", "number": 7}


@pytest.fixture
def pool() -> Iterator[DirectoryPool]:
    made = DirectoryPool()
    yield made
    made.close()


class Prepared(NumberEnv):
    """Counts how often an item is prepared."""

    prepared = 0

    async def prepare(self, item: Any, ctx: SandboxContext) -> None:
        self.prepared += 1
        await ctx.write_file("given.txt", "given")

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        given = await ctx.read_file("given.txt")
        return float(given == b"given") * await super().compute_reward(item, result, ctx)


async def test_samples_are_the_segments_in_no_trainers_dialect(pool: DirectoryPool) -> None:
    async with standin_model(sometimes_right) as (model, _), Rollouts(NumberEnv(pool, model)) as rollouts:
        samples = await rollouts.group(ITEM, 4)
    assert len(samples) == 4
    assert {sample.group_id for sample in samples} == {samples[0].group_id}
    assert len({sample.rollout_id for sample in samples}) == 4
    mean = sum(sample.reward for sample in samples) / 4
    for sample in samples:
        [segment] = sample.record.segments
        assert sample.tokens == segment.tokens
        assert sample.mask == [int(mask != -100) for mask in segment.masks]
        kept = [p if m else 0.0 for p, m in zip(segment.logprobs, sample.mask, strict=True)]
        assert sample.logprobs == kept
        assert all(p <= 0 for p in sample.logprobs)
        assert sample.prompt_len == sample.mask.index(1)
        assert (sample.segment, sample.last, sample.weights) == (0, True, [None, None])
        assert sample.advantage is not None
        assert sample.one_advantage() * (sample.reward - mean) > 0


async def test_a_token_backend_is_enough_of_a_model(pool: DirectoryPool) -> None:
    async with StandIn(right) as standin:
        backend = VllmBackend(standin.url, model="standin")
        env = NumberEnv(pool)
        async with Rollouts(env, model=backend, tokenizer=chatml_tokenizer()) as rollouts:
            items = [item async for item, _ in zip_first(rollouts.items(), 2)]
            assert [item["number"] for item in items] == [0, 1]
            assert [sample.reward for sample in await rollouts.group(items[0], 2)] == [1.0, 1.0]


async def zip_first(items: Any, count: int) -> Any:
    number = 0
    async for item in items:
        yield item, number
        number += 1
        if number == count:
            return


async def test_members_of_a_group_share_what_was_prepared(pool: DirectoryPool) -> None:
    async with standin_model(right) as (model, _), Rollouts(Prepared(pool, model)) as rollouts:
        env = rollouts.env
        assert isinstance(env, Prepared)
        made = await asyncio.gather(*(rollouts.member(ITEM, "a") for _ in range(4)))
        assert env.prepared == 1
        [later] = await rollouts.member(ITEM, "a")
        assert env.prepared == 1
        ids = [sample.rollout_id for [sample] in made] + [later.rollout_id]
        assert len(set(ids)) == 5
        assert {sample.group_id for [sample] in made} == {later.group_id}
        assert (later.reward, later.advantage) == (1.0, None)
        with pytest.raises(ValueError, match="group 'a' is of item x"):
            await rollouts.member({"id": "y", "number": 1}, "a")
        assert len(pool.snapshots) == 1
    assert pool.snapshots == []
    assert pool.live == {}


async def test_rollouts_for_other_trainers_are_stored_where_the_settings_say(
    pool: DirectoryPool, tmp_path: Path
) -> None:
    stored = tmp_path / "rollouts.jsonl"
    env = NumberEnv(pool, rollout_tries=1, data_path_to_save_groups=str(stored))
    async with standin_model(right) as (env.model, _), Rollouts(env) as rollouts:
        samples = await rollouts.group(ITEM, 2)
        samples += await rollouts.member(ITEM, "a")
        pool.refuse = ["a/1"]
        with pytest.raises(RolloutLost) as lost:
            await rollouts.member(ITEM, "a")
    told = {sample.rollout_id for sample in samples} | {record.rollout_id for record in lost.value.records}
    assert {RolloutRecord.from_json(line).rollout_id for line in stored.read_bytes().splitlines()} == told
    assert len(told) == 4


async def test_prepared_states_of_old_groups_are_dropped(pool: DirectoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_SNAPSHOTS", 2)
    async with standin_model(right) as (model, _), Rollouts(Prepared(pool, model)) as rollouts:
        for name in "abc":
            await rollouts.member(ITEM, name)
        assert len(pool.snapshots) == 2
        [again] = await rollouts.member(ITEM, "a")
        assert again.rollout_id.endswith("-a/1")
        assert again.reward == 1.0


async def test_what_infrastructure_took_is_an_error_and_never_a_score(pool: DirectoryPool) -> None:
    async with standin_model(right) as (model, _), Rollouts(Prepared(pool, model, rollout_tries=1)) as rollouts:
        pool.refuse = ["/2"]
        with pytest.raises(RolloutLost, match="3 of 4 rollouts of x: 1 lost, the last to sandbox_lost"):
            await rollouts.group(ITEM, 4)
        pool.refuse = ["a/0"]
        with pytest.raises(RolloutLost) as lost:
            await rollouts.member(ITEM, "a")
        assert [record.score for record in lost.value.records] == [None]
        assert [sample.reward for sample in await rollouts.member(ITEM, "a")] == [1.0]
        assert isinstance(rollouts.env, Prepared)
        assert rollouts.env.prepared == 2, "a snapshot that is still there is not made again"
        pool.refuse = ["b/prepare"]
        with pytest.raises(RolloutLost, match="item x: 1 lost, the last to prepare_error"):
            await rollouts.member(ITEM, "b")


async def test_what_was_prepared_and_went_with_its_host_is_prepared_again_once(
    pool: DirectoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRY_AGAIN_S", 0.0)

    class OnLostHosts(Prepared):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            if self.prepared == 1:
                shutil.rmtree(pool.home / "snapshot-1", ignore_errors=True)  # the one that all of them start from
                raise SandboxLost("the host went away")
            return await super().compute_reward(item, result, ctx)

    env = OnLostHosts(pool, rollout_tries=2)
    async with standin_model(right) as (env.model, _), Rollouts(env) as rollouts:
        samples = await rollouts.group(ITEM, 4)
        assert [sample.reward for sample in samples] == [1.0] * 4
        assert env.prepared == 2
        assert pool.snapshots == []
        assert [sample.reward for sample in await rollouts.member(ITEM, "a")] == [1.0]
        shutil.rmtree(pool.home / pool.snapshots[0])
        assert [sample.reward for sample in await rollouts.member(ITEM, "a")] == [1.0]
        assert env.prepared == 4
    assert pool.snapshots == []


async def test_a_member_that_is_lost_takes_nothing_from_those_that_still_wait(pool: DirectoryPool) -> None:
    narrow = DirectoryPool(slots=1)
    async with standin_model(right) as (model, _), Rollouts(Prepared(narrow, model, rollout_tries=1)) as rollouts:
        narrow.refuse = ["a/2"]
        made = await asyncio.gather(*(rollouts.member(ITEM, "a") for _ in range(3)), return_exceptions=True)
        assert [type(one) for one in made] == [list, list, RolloutLost]
    narrow.close()


async def test_what_is_not_open_says_so_and_is_no_loss(pool: DirectoryPool) -> None:
    env = Prepared(None, NoModel())
    rollouts = Rollouts(env, pool=pool)
    env.pool = None
    for ask in (lambda: rollouts.group(ITEM, 2), lambda: rollouts.member(ITEM, "a")):
        with pytest.raises(RuntimeError, match=r"not open: use `async with Rollouts"):
            await ask()
    env.pool = pool
    with pytest.raises(ValueError, match="at least one rollout, not 0"):
        await rollouts.group(ITEM, 0)


async def test_rollouts_can_be_opened_again(pool: DirectoryPool) -> None:
    async with StandIn(right) as standin:
        server = ServerConfig(server_type="vllm", base_url=standin.url, model_name="standin", tokenizer_name="standin")
        env = NumberEnv(pool, servers=[server])
        rollouts = Rollouts(env)
        for _ in range(2):
            async with rollouts:
                assert [sample.reward for sample in await rollouts.group(ITEM, 2)] == [1.0, 1.0]
            assert (env.model, env.pool) == (None, pool), "what was given stays, what was opened goes"


def long_winded(request: PolicyRequest) -> str:
    return "Done." if request.results >= 5 else call("terminal", {"command": "seq 300"})


@pytest.mark.parametrize("segments", ["all", "last", "forbid"])
async def test_rollouts_with_several_segments(pool: DirectoryPool, segments: str) -> None:
    sizes = {"max_token_length": 2400, "max_tokens_per_turn": 100, "max_agent_turns": 8, "segments": segments}
    async with standin_model(long_winded, split_share=0.0) as (model, _):
        env = NumberEnv(pool, model, **sizes, enabled_toolsets=["terminal"], disabled_toolsets=["process"])
        async with Rollouts(env) as rollouts:
            if segments == "forbid":
                with pytest.raises(ConfigError, match=r"segments, and `env\.segments` is `forbid`"):
                    await rollouts.group(ITEM, 1)
                return
            samples = await rollouts.group(ITEM, 1)
    record = samples[0].record
    assert len(record.segments) > 1
    assert [sample.segment for sample in samples] == list(range(len(record.segments)))[0 if segments == "all" else -1 :]
    assert [sample.last for sample in samples] == [False] * (len(samples) - 1) + [True]
    if segments == "all":
        assert sum(sum(sample.mask) for sample in samples) == sum(len(c.sampled_ids) for c in record.sampled_calls)
        assert sum(len(sample.weights) for sample in samples) == len(record.sampled_calls)


async def test_points_per_turn_are_not_lost_on_the_way(pool: DirectoryPool) -> None:
    class PerTurn(NumberEnv):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Score:
            return Score(1.0, [0.0, 1.0])

    async with standin_model(right) as (model, _), Rollouts(PerTurn(pool, model)) as rollouts:
        [sample, _] = await rollouts.group(ITEM, 2)
    assert sample.token_advantages is not None
    assert [a != 0 for a in sample.token_advantages] == [bool(m) for m in sample.mask]
    with pytest.raises(ConfigError, match="takes one advantage per sequence"):
        sample.one_advantage()


def test_blocking_rollouts_need_no_event_loop(pool: DirectoryPool) -> None:
    rollouts = Rollouts(NumberEnv(pool))  # the stand-in plays nothing useful here: what counts is that it is judged
    with BlockingRollouts(rollouts) as blocking:
        item = next(blocking.items())
        assert len(blocking.group(item, 2)) == 2
        assert len(blocking.member(item, "a")) == 1
    assert pool.live == {}


def test_blocking_rollouts_tell_whoever_would_wait_for_ever(pool: DirectoryPool) -> None:
    blocking = BlockingRollouts(Rollouts(NumberEnv(pool)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not open: use `with BlockingRollouts"):
            blocking.group(ITEM, 1)
        with blocking:

            async def inside() -> None:
                blocking.group(ITEM, 1)

            with pytest.raises(RuntimeError, match="this is the thread of the rollouts"):
                blocking.wait(inside())
            with pytest.raises(RuntimeError, match="open already"):
                blocking.__enter__()
            assert len(blocking.group(ITEM, 1)) == 1


def test_what_runs_at_the_end_of_the_block_is_cancelled_before_its_slots_go(pool: DirectoryPool) -> None:
    seen: list[str] = []

    class Ends(NumberEnv):
        async def shut_down(self) -> None:
            seen.append("closed")
            await super().shut_down()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("cancelled")

    with BlockingRollouts(Rollouts(Ends(pool))) as blocking:
        pending = blocking.submit(work())
        blocking.items()
        assert len(blocking.group(ITEM, 1)) == 1
    assert pending.cancelled()
    assert seen == ["cancelled", "closed"]


def test_ctrl_c_stops_the_rollouts_that_were_waited_for(pool: DirectoryPool) -> None:
    class Interrupts(NumberEnv):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            await ctx.terminal("true")
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
            return 0.0

    with BlockingRollouts(Rollouts(Interrupts(pool))) as blocking:
        with pytest.raises(KeyboardInterrupt):
            blocking.group(ITEM, 1)
        while pool.live:
            blocking.wait(asyncio.sleep(0.01))


async def test_a_session_has_the_tools_and_the_frozen_verification_of_a_rollout(pool: DirectoryPool) -> None:
    async with standin_model(right) as (model, standin), Rollouts(Prepared(pool, model)) as rollouts:
        async with ToolSession(rollouts) as session:
            assert await session.open(ITEM) == [{"role": "user", "content": "Write 7 into answer.txt"}]
            assert [tool["function"]["name"] for tool in session.schemas()][:2] == ["terminal", "process"]
            assert '"output": "given"' in await session.call("terminal", {"command": "cat given.txt"})
            await session.call("terminal", '{"command": "echo 7 > answer.txt"}')
            assert "Did you mean terminal?" in await session.call("terminl", {})
            assert await session.reward() == 1.0
            record = session.record
            assert await session.open(ITEM)
            assert await session.reward() == 0.0
        assert isinstance(rollouts.env, Prepared)
        assert rollouts.env.prepared == 1
        assert standin.log == []
    assert record is not None
    assert record.metrics["tool_calls_attempted"] == 3
    assert record.metrics["tool_calls_unknown"] == 1
    assert [message["role"] for message in record.messages] == ["user", *["assistant", "tool"] * 3]
    assert sum(name.endswith("/verify") for name in pool.leases) == 2
    assert pool.live == {}


async def test_a_session_whose_slot_is_lost_has_no_reward(pool: DirectoryPool) -> None:
    async with standin_model(right) as (model, _), Rollouts(NumberEnv(pool, model)) as rollouts:
        session = ToolSession(rollouts)
        await session.open(ITEM)
        for sandbox in pool.live.values():
            sandbox.lost = True
        with pytest.raises(SandboxLost):
            await session.call("terminal", {"command": "true"})
        with pytest.raises(RolloutLost, match="sandbox_lost"):
            await session.reward()
    assert pool.live == {}


async def test_a_session_is_over_after_its_reward_and_never_mixes_two(pool: DirectoryPool) -> None:
    async with standin_model(right) as (model, _), Rollouts(Prepared(pool, model)) as rollouts:
        session = ToolSession(rollouts)
        await asyncio.gather(session.open({"id": "y", "number": 1}), session.open(ITEM))
        assert len(pool.live) == 1, "the second gave back the first's slot"
        said = await asyncio.gather(*(session.call("terminal", {"command": f"echo {n}"}) for n in (1, 2)))
        assert [message["role"] for message in session.messages] == ["user", *["assistant", "tool"] * 2]
        assert {message["content"] for message in session.messages[2::2]} == set(said)
        await session.call("terminal", {"command": "echo 7 > answer.txt"})
        assert await session.reward() == 1.0
        for again in (session.call("terminal", {"command": "true"}), session.reward()):
            with pytest.raises(RuntimeError, match=r"not open: call open\(item\) first"):
                await again
        assert session.record is not None
        assert session.record.score == 1.0
        assert pool.live == {}


async def test_a_session_prepares_again_what_went_with_its_host(pool: DirectoryPool, tmp_path: Path) -> None:
    stored = tmp_path / "rollouts.jsonl"
    env = Prepared(pool, NoModel(), data_path_to_save_groups=str(stored))
    async with Rollouts(env) as rollouts, ToolSession(rollouts) as session:
        await session.open(ITEM)
        for sandbox in pool.live.values():
            sandbox.lost = True
        shutil.rmtree(pool.home / pool.snapshots[0])
        with pytest.raises(SandboxLost):
            await session.call("terminal", {"command": "true"})
        with pytest.raises(RolloutLost):
            await session.reward()
        await session.open(ITEM)
        assert env.prepared == 2
        pool.refuse = ["/2"]
        with pytest.raises(AcquireTimeout):
            await session.open(ITEM)
        await session.open(ITEM)
        assert env.prepared == 2
        assert await session.reward() == 0.0
    records = [RolloutRecord.from_json(line) for line in stored.read_bytes().splitlines()]
    assert [record.trainable for record in records] == [False, True]


@pytest.mark.parametrize("name", ["terminal_tasks", "code_tasks"])
async def test_items_travel_as_json(pool: DirectoryPool, name: str) -> None:
    from environments.launch import load_environment

    env = load_environment(name)
    await env.setup()
    for item in [await env.get_next_item(), (await env.evaluation_items())[0]]:
        again = env.item_from_json(env.item_to_json(item))
        assert (env.item_id(again), env.format_prompt(again)) == (env.item_id(item), env.format_prompt(item))
    with pytest.raises(ConfigError, match="write item_to_json"):
        NumberEnv(pool).item_to_json(object())
