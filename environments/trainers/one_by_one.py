"""Rollouts asked for one by one, by trainers that sample themselves: verl, SkyRL, slime.

Such a trainer runs our code inside its workers and never says when it is done: an environment is opened with the first
rollout that needs it and stays open as long as the worker's event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from agent_loop.model.backends.backend import TokenBackend
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from agent_loop.model.tokens.template import ChatTemplate
from environments.errors import ConfigError
from environments.launch import load_environment
from environments.rollouts.rollouts import Rollouts
from environments.rollouts.samples import Sample, samples_of
from environments.rollouts.tool_session import NoModel
from tool_parsers import get_parser


class OneByOne:
    """An opened environment whose rollouts bring their own samplers."""

    def __init__(self, rollouts: Rollouts, template: ChatTemplate) -> None:
        self._rollouts, self._template = rollouts, template
        self._servers: dict[str, TokenBackend] = {}

    def server(self, url: str, connect: Callable[[str], TokenBackend]) -> TokenBackend:
        """The backend of a server, one for all rollouts; closed with the environment."""
        if url not in self._servers:
            self._servers[url] = connect(url)
        return self._servers[url]

    async def close(self) -> None:
        """Close the servers' backends."""
        for backend in self._servers.values():
            await backend.close()

    async def roll_out(self, item: str, backend: TokenBackend, temperature: float | None = None) -> list[Sample]:
        """One rollout of an item (as `item_rows.py` writes it). Rollouts of an item share what `prepare` made.

        RolloutLost when infrastructure ended it: these trainers have no place for it, and it is never a reward.
        """
        env = self._rollouts.env
        own = env.item_from_json(json.loads(item))
        parser = get_parser(env.config.tool_call_parser)
        model = Recorder(backend, self._template, parser, write_tools=env.config.tools_in_prompt)
        rollout = await self._rollouts.run_member(own, env.item_id(own), temperature, model)
        return samples_of([rollout], env.config.segments, None)


_open: dict[tuple[Any, ...], asyncio.Future[OneByOne]] = {}
_keepers: set[asyncio.Task[None]] = set()


async def opened(
    environment: str,
    settings: Sequence[str],
    tokenizer: Any,
    *,
    most_tokens: int | None = None,
    one_sequence: bool = True,
) -> OneByOne:
    """The environment, opened once for each event loop.

    `most_tokens` is what a sequence may have at most; `one_sequence` refuses `env.segments: all`.
    """
    loop = asyncio.get_running_loop()
    key = (loop, environment, *settings)
    if key not in _open:
        _open[key] = loop.create_future()
        keeper = loop.create_task(_keep_open(_open[key], environment, settings, tokenizer, most_tokens, one_sequence))
        _keepers.add(keeper)
        keeper.add_done_callback(_keepers.discard)
        keeper.add_done_callback(lambda _: _open.pop(key, None))
    return await asyncio.shield(_open[key])


async def _keep_open(
    told: asyncio.Future[OneByOne],
    environment: str,
    settings: Sequence[str],
    tokenizer: Any,
    most_tokens: int | None,
    one_sequence: bool,
) -> None:
    try:
        env = load_environment(environment, settings)
        if one_sequence and env.config.segments == "all":
            raise ConfigError("this trainer takes one sequence per rollout: set env.segments to last, or to forbid")
        if most_tokens is not None:
            env.config.max_token_length = min(env.config.max_token_length or most_tokens, most_tokens)
        template = await asyncio.to_thread(probe_template, tokenizer)
        async with Rollouts(env, model=NoModel()) as rollouts:
            own = OneByOne(rollouts, template)
            told.set_result(own)
            try:
                await asyncio.Event().wait()
            finally:
                await own.close()
    except Exception as error:  # whoever waits is told
        if told.done():
            raise
        told.set_exception(error)


async def close_all() -> None:
    """Close what is open in this event loop; for programs that go on without rollouts."""
    own = [keeper for keeper in _keepers if keeper.get_loop() is asyncio.get_running_loop()]
    for keeper in own:
        keeper.cancel()
    await asyncio.gather(*own, return_exceptions=True)
