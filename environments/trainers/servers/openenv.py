"""OpenEnv 0.10: any of our environments as an OpenEnv server (`hermes-rl offer CONFIG --to openenv`).

Actions are OpenEnv's own for tools (`list_tools`, `call_tool`), so its clients need nothing of ours; an observation of
`reset` has the messages of the task. Each WebSocket session has its own slot, and gives it back when it ends.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_types import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
)
from openenv.core.env_server.types import ConcurrencyConfig, EnvironmentMetadata, Observation, State
from pydantic import Field

from environments.rollouts.blocking import BlockingRollouts
from environments.trainers.servers.episodes import Episode, Tasks

SILENT_S = 3600.0
"""How long a session without a WebSocket may be silent, where `env.limits.rollout_timeout_s` says nothing."""


class TaskObservation(Observation):  # type: ignore[misc]
    """What an episode begins with."""

    item_id: str = ""
    messages: list[dict[str, Any]] = Field(default_factory=list)


class SlotEpisodes(Environment):  # type: ignore[misc]
    """One client's episodes, as OpenEnv calls them."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, tasks: Tasks) -> None:
        super().__init__()
        self._tasks, self._episode = tasks, Episode(tasks)
        self._episode_id: str | None = None

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str = "train",
        index: int | None = None,
        **_: Any,
    ) -> TaskObservation:
        messages = await self._episode.reset(split, index, seed)
        self._episode_id = episode_id
        return TaskObservation(item_id=self._episode.item_id or "", messages=messages)

    async def step_async(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        if isinstance(action, ListToolsAction):
            known = [tool["function"] for tool in self._episode.tools()]
            return ListToolsObservation(
                tools=[
                    Tool(name=of["name"], description=of.get("description", ""), input_schema=of["parameters"])
                    for of in known
                ]
            )
        assert isinstance(action, CallToolAction)
        done = await self._episode.call(action.tool_name, action.arguments)
        return CallToolObservation(
            tool_name=action.tool_name, result=done.text, done=done.reward is not None, reward=done.reward
        )

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Observation:
        raise NotImplementedError("this environment is asynchronous")

    def step(self, action: Any, timeout_s: float | None = None, **more: Any) -> Observation:
        raise NotImplementedError("this environment is asynchronous")

    @property
    def state(self) -> State:
        facts = {"item_id": self._episode.item_id}
        return State(episode_id=self._episode_id, step_count=self._episode.calls, **facts)

    def get_metadata(self) -> EnvironmentMetadata:
        env = self._tasks.env
        about = " ".join((type(env).__doc__ or env.name or "").split())
        return EnvironmentMetadata(name=str(env.name), description=about, version=version("hermes-rl"))

    def close(self) -> None:
        self._episode.close_soon()

    # OpenEnv's Task API

    def list_splits(self) -> list[str]:
        return list(self._tasks.splits)

    def num_tasks(self, split: str) -> int:
        return len(self._tasks.splits.get(split, ()))

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return self.get_task_range(split)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        return self._tasks.about(split, index)

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        return [self._tasks.about(split, index) for index in range(self.num_tasks(split))[start:stop]]


def openenv_app(rollouts: BlockingRollouts, items: int) -> Any:
    """The server as an ASGI application. As many sessions as rollouts of `process`: `groups_at_once` groups."""
    tasks = Tasks(rollouts, items)
    config = tasks.env.config
    sessions = config.groups_at_once * config.group_size
    silent_s = config.limits.rollout_timeout_s or SILENT_S
    return create_fastapi_app(
        lambda: SlotEpisodes(tasks),
        CallToolAction,
        CallToolObservation,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=silent_s),
        env_name=str(tasks.env.name),
        reset_observation_cls=TaskObservation,
    )
