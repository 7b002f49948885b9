"""Episodes of reset, calls and a reward, as servers for other trainers offer them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agent_loop.tools.own_tools import tool
from environments.errors import ConfigError, RolloutLost
from environments.rollouts.blocking import BlockingRollouts
from environments.rollouts.rollouts import Rollouts
from environments.rollouts.tool_session import NoModel
from environments.trainers.servers.episodes import Episode, Tasks
from sandbox_pool.errors import SandboxLost
from support.env_pool import DirectoryPool
from support.env_tasks import NumberEnv


@pytest.fixture
def pool() -> Iterator[DirectoryPool]:
    pool = DirectoryPool()
    yield pool
    pool.close()


@pytest.fixture
def tasks(pool: DirectoryPool) -> Iterator[Tasks]:
    env = NumberEnv(pool, NoModel(), eval_items=2, limits={"max_tool_calls": 3})
    with BlockingRollouts(Rollouts(env)) as rollouts:
        yield Tasks(rollouts, 4)
    assert pool.live == {}


async def test_an_episode_is_judged_by_what_it_leaves_behind(tasks: Tasks, pool: DirectoryPool) -> None:
    episode = Episode(tasks)
    for seed, wanted in ((3, 1.0), (3, 0.0), (7, 1.0)):  # four tasks: seeds 3 and 7 are the same one
        assert (await episode.reset(seed=seed))[-1]["content"] == "Write 3 into answer.txt"
        assert (episode.item_id, episode.calls) == ("n3", 0)
        if wanted:
            assert (await episode.call("terminal", {"command": "echo 3 > answer.txt"})).reward is None
        assert (await episode.call("submit", {})).reward == wanted
        with pytest.raises(RuntimeError, match="reset first"):
            await episode.call("terminal", {"command": "true"})
    assert pool.live == {}


async def test_tasks_are_found_by_split_and_index(tasks: Tasks) -> None:
    assert {name: len(items) for name, items in tasks.splits.items()} == {"train": 4, "test": 2}
    known = tasks.about("test", 1)
    assert (known["id"], known["messages"][-1]["content"]) == ("e1", "Write 1 into answer.txt")
    assert set(known) == {"id", "index", "category", "messages"}, "an agent may read this: nothing of the solution"
    episode = Episode(tasks)
    assert (await episode.reset("test", 1))[-1]["content"] == "Write 1 into answer.txt"
    for split, index in (("test", 2), ("test", -1), ("nosuch", 0)):
        with pytest.raises(IndexError, match=r"\(train: 4, test: 2\)"):
            await episode.reset(split, index)
    with pytest.raises(IndexError):
        await episode.reset("nosuch", seed=1)


async def test_tools_are_known_before_and_during_an_episode(tasks: Tasks) -> None:
    episode = Episode(tasks)
    names = [schema["function"]["name"] for schema in episode.tools()]
    assert (names[0], names[-1]) == ("terminal", "submit")
    await episode.reset()
    assert [schema["function"]["name"] for schema in episode.tools()] == names
    assert "Did you mean terminal?" in (await episode.call("terminl", {})).text
    episode.close_soon().result(10)


async def test_a_limit_of_the_rollout_ends_the_episode_with_its_reward(tasks: Tasks) -> None:
    episode = Episode(tasks)
    await episode.reset(seed=2)
    steps = [await episode.call("terminal", {"command": "echo 2 > answer.txt"}) for _ in range(4)]
    assert [step.reward for step in steps] == [None, None, None, 1.0]


async def test_a_lost_slot_is_an_error_and_never_a_reward(tasks: Tasks, pool: DirectoryPool) -> None:
    episode = Episode(tasks)
    await episode.reset()
    for sandbox in pool.live.values():
        sandbox.lost = True
    with pytest.raises(SandboxLost):
        await episode.call("terminal", {"command": "true"})
    with pytest.raises(RolloutLost, match="sandbox_lost"):
        await episode.call("submit", {})
    await episode.reset()
    assert (await episode.call("submit", {})).reward == 0.0


async def test_the_closing_words_reach_rewards_that_read_them(pool: DirectoryPool) -> None:
    class Says(NumberEnv):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float(result.final_answer == "seven")

    with BlockingRollouts(Rollouts(Says(pool, NoModel()))) as rollouts:
        episode = Episode(Tasks(rollouts, 1))
        await episode.reset()
        assert (await episode.call("submit", {"answer": "seven"})).reward == 1.0


def test_a_tool_called_submit_is_refused(pool: DirectoryPool) -> None:
    @tool
    async def submit() -> str:
        """Something else."""
        return ""

    class Own(NumberEnv):
        def tools(self, item: Any) -> list[Any]:
            return [submit]

    with (
        BlockingRollouts(Rollouts(Own(pool, NoModel()))) as rollouts,
        pytest.raises(ConfigError, match="give it another name"),
    ):
        Tasks(rollouts, 1)
