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

import uuid
from collections.abc import Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from agent_loop.model.backends.backend import Generation
from agent_loop.model.contract import ModelRefused, ModelUnavailable, Sampling
from environments.rollouts.samples import Sample
from environments.trainers.one_by_one import opened


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


class VerlAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """One rollout of the row's item; all loops of a worker share one environment."""

    def __init__(self, *args: Any, environment: str, settings: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._source = (environment, list(settings))

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        lengths = self.rollout_config
        rollouts = await opened(*self._source, self.tokenizer, most_tokens=int(lengths.response_length))
        backend = VerlBackend(self.server_manager, sampling_params)
        [sample] = await rollouts.roll_out(kwargs["extra_info"]["item"], backend, sampling_params.get("temperature"))
        return verl_output(sample, int(lengths.prompt_length))


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
