"""verl 0.9: our rollouts as an agent loop. Sampling and weights stay verl's, tokens are exact, slots are ours.

The file that `actor_rollout_ref.rollout.agent.agent_loop_config_path` names has the entry

    - name: hermes
      _target_: environments.trainers.verl.VerlAgentLoop
      environment: terminal_tasks
      settings: ["--env.segments", "last"]

and `verl_rows` makes the rows of a dataset, each with `agent_name: hermes` and its item. A rollout that infrastructure
ended raises, and ends the step: verl has no place for it, and it is never a reward.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from agent_loop.model.backends.backend import Generation
from agent_loop.model.contract import ModelRefused, ModelUnavailable, Sampling
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from agent_loop.model.tokens.template import ChatTemplate
from environments.errors import ConfigError
from environments.launch import load_environment
from environments.rollouts.rollouts import Rollouts
from environments.rollouts.samples import Sample, samples_of
from environments.rollouts.tool_session import NoModel
from tool_parsers import get_parser


class VerlBackend:
    """verl's server client as a token backend: one rollout, so that its turns stay on one server."""

    def __init__(self, client: Any, sampling_params: dict[str, Any]) -> None:
        self._client, self._given = client, sampling_params
        self._request_id = uuid.uuid4().hex

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        """Sample one continuation, as verl's config says; the length of the turn and where it ends are ours."""
        params = {**self._given, "logprobs": True, "max_tokens": sampling.max_tokens, "stop_token_ids": list(stop_ids)}
        made = await self._client.generate(self._request_id, prompt_ids=list(prompt_ids), sampling_params=params)
        if made.stop_reason == "aborted":
            raise ModelUnavailable("verl aborted the request, as it does when weights change")
        ids, logprobs = list(made.token_ids), made.log_probs
        if logprobs is None or len(logprobs) != len(ids):
            raise ModelRefused("verl's server gave no logprobs: set actor_rollout_ref.rollout.calculate_log_probs")
        full = sampling.max_tokens is not None and len(ids) >= sampling.max_tokens  # verl calls both ends completed
        step = made.extra_fields.get("global_steps")
        ended = "length" if full and ids[-1] not in stop_ids else "stop"
        return Generation(ids, list(logprobs), ended, None if step is None else str(step))

    async def context_tokens(self) -> int | None:
        """verl does not tell."""

    async def close(self) -> None:
        """The client is verl's."""


Opened = tuple[Rollouts, ChatTemplate]


class VerlAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """One rollout of the row's item; all loops of a worker share one environment."""

    _opened: ClassVar[dict[tuple[Any, ...], asyncio.Future[Opened]]] = {}
    _keepers: ClassVar[set[asyncio.Task[None]]] = set()

    def __init__(self, *args: Any, environment: str, settings: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._source = (environment, *settings)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        rollouts, template = await self._open()
        env = rollouts.env
        item = env.item_from_json(json.loads(kwargs["extra_info"]["item"]))
        backend, parser = VerlBackend(self.server_manager, sampling_params), get_parser(env.config.tool_call_parser)
        model = Recorder(backend, template, parser, write_tools=env.config.tools_in_prompt)
        rollout = await rollouts.run_member(item, env.item_id(item), sampling_params.get("temperature"), model)
        [sample] = samples_of([rollout], env.config.segments, None)
        return verl_output(sample, int(self.rollout_config.prompt_length))

    async def _open(self) -> Opened:
        """Open the environment with the first loop; it is closed with the event loop of the worker."""
        key = (asyncio.get_running_loop(), *self._source)
        if key not in self._opened:
            self._opened[key] = asyncio.get_running_loop().create_future()
            self._keepers.add(asyncio.create_task(self._keep_open(self._opened[key])))
        return await asyncio.shield(self._opened[key])

    async def _keep_open(self, opened: asyncio.Future[Opened]) -> None:
        try:
            env = load_environment(self._source[0], self._source[1:])
            if env.config.segments == "all":
                raise ConfigError("verl takes one sequence per rollout: set env.segments to last, or to forbid")
            most = int(self.rollout_config.response_length)
            env.config.max_token_length = min(env.config.max_token_length or most, most)
            template = await asyncio.to_thread(probe_template, self.tokenizer)
            async with Rollouts(env, model=NoModel()) as rollouts:
                opened.set_result((rollouts, template))
                await asyncio.Event().wait()
        except Exception as error:  # whoever waits for the rollouts is told
            if opened.done():
                raise
            opened.set_exception(error)


def verl_output(sample: Sample, prompt_length: int) -> AgentLoopOutput:
    """A sample as verl's output. What is too long for verl's prompt begins its response, masked."""
    cut = min(sample.prompt_len, prompt_length)
    record = sample.record
    steps = [int(weights) for weights in sample.weights if weights is not None]
    extra = {"rollout_id": sample.rollout_id, "outcome": record.outcome}
    return AgentLoopOutput(
        prompt_ids=sample.tokens[:cut],
        response_ids=sample.tokens[cut:],
        response_mask=sample.mask[cut:],
        response_logprobs=sample.logprobs[cut:],
        reward_score=sample.reward,
        num_turns=len(record.messages),
        metrics=AgentLoopMetrics(
            generate_sequences=record.timing.get("model_s", 0.0), tool_calls=record.timing.get("tools_s", 0.0)
        ),
        extra_fields=extra | ({"min_global_steps": min(steps), "max_global_steps": max(steps)} if steps else {}),
    )
