"""Episodes of reset, calls and a reward, for trainers that call environments over a wire.

An episode is a `ToolSession`: `reset` leases a prepared slot, calls run in it, and the tool `submit` ends the episode
with the score of the frozen verification. What infrastructure takes is an error of the episode, never a reward.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from agent_loop.model.contract import ToolSchema
from environments.errors import ConfigError
from environments.rollouts.blocking import BlockingRollouts
from environments.rollouts.planning import first_messages
from environments.rollouts.tool_session import ToolSession

log = logging.getLogger(__name__)
T = TypeVar("T")

SUBMIT: dict[str, Any] = {
    "name": "submit",
    "description": "End the episode: what you left behind is judged.",
    "parameters": {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "Your closing words, if any."}},
    },
}


class Tasks:
    """The items of an environment in two splits: `train` are its next ones, `test` its evaluation items."""

    def __init__(self, rollouts: BlockingRollouts, count: int) -> None:
        """Takes `count` items for training; ConfigError when there are none, or when a tool is called `submit`."""
        self.rollouts, self.env = rollouts, rollouts.rollouts.env
        train = [item for item, _ in zip(rollouts.items(), range(count), strict=False)]
        self.splits = {"train": train, "test": rollouts.wait(self.env.chosen_evaluation_items())}
        if not train:
            raise ConfigError(f"{self.env.name} has no items")
        self.tools = rollouts.wait(self._tools())

    async def _tools(self) -> list[ToolSchema]:
        """As the first item has them: clients ask before there is an episode."""
        async with ToolSession(self.rollouts.rollouts) as session:
            await session.open(self.splits["train"][0])
            if any(tool["function"]["name"] == SUBMIT["name"] for tool in session.schemas()):
                raise ConfigError("a tool is called `submit`, which ends an episode: give it another name")
            return session.schemas()

    def about(self, split: str, index: int) -> dict[str, Any]:
        """What an agent may know of a task; IndexError when there is none."""
        item = self.item(split, index)
        prompt = first_messages(self.env.config, self.env.format_prompt(item))
        category = self.env.category(item)
        return {"id": self.env.item_id(item), "index": index, "category": category, "messages": prompt}

    def item(self, split: str, index: int) -> Any:
        """IndexError says which there are."""
        items = self.splits.get(split)
        if items is None or not 0 <= index < len(items):
            there = ", ".join(f"{name}: {len(known)}" for name, known in self.splits.items())
            raise IndexError(f"there is no task {index} in split {split!r} ({there})")
        return items[index]


@dataclass(frozen=True)
class Step:
    """What a call gave; a `reward` ends the episode."""

    text: str
    reward: float | None = None


class Episode:
    """What one client does: episodes after each other. Its methods may run in any event loop."""

    def __init__(self, tasks: Tasks) -> None:
        self.item_id: str | None = None
        self.calls = 0
        self._tasks = tasks
        self._session: ToolSession | None = None

    async def reset(self, split: str = "train", index: int | None = None, seed: int | None = None) -> list[Any]:
        """Begin with the task of this index, else of this seed: the same seed is the same task. Its messages."""
        await self._there(self.close())
        known = self._tasks.splits.get(split, ())
        item = self._tasks.item(split, (seed or 0) % max(1, len(known)) if index is None else index)
        session = ToolSession(self._tasks.rollouts.rollouts)
        messages = await self._there(session.open(item))
        self._session, self.item_id, self.calls = session, self._tasks.env.item_id(item), 0
        return messages

    async def call(self, name: str, arguments: dict[str, Any]) -> Step:
        """Run a call; the limits of the rollout end the episode as well as `submit` does."""
        session = self._open()
        self.calls += 1
        if name == SUBMIT["name"]:
            return Step("", await self._judge(session, str(arguments.get("answer") or "")))
        text = await self._there(session.call(name, arguments))
        return Step(text, None if session.ended is None else await self._judge(session, ""))

    def tools(self) -> Sequence[ToolSchema]:
        """Of the episode, or of the first task before there is one; with `submit`."""
        own = self._tasks.tools if self._session is None else self._session.schemas()
        return [*own, {"type": "function", "function": SUBMIT}]

    async def close(self) -> None:
        """Give back the slot, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def close_soon(self) -> Future[None]:
        """`close`, from any thread, and without waiting for the slot."""
        closing = self._tasks.rollouts.submit(self.close())
        closing.add_done_callback(_say_failure)
        return closing

    async def _judge(self, session: ToolSession, answer: str) -> float:
        self._session = None
        closing = [{"role": "assistant", "content": answer}] if answer else []
        return await self._there(session.reward([*session.messages, *closing]))

    def _open(self) -> ToolSession:
        if self._session is None:
            raise RuntimeError("there is no episode: reset first")
        return self._session

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the thread that the slots belong to."""
        return await asyncio.wrap_future(self._tasks.rollouts.submit(work))


def _say_failure(closing: Future[None]) -> None:
    if not closing.cancelled() and (error := closing.exception()) is not None:
        log.warning("a slot was not given back in good order: %s", error)
