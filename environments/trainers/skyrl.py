"""SkyRL 0.4: our rollouts as its generator. Sampling and weights stay SkyRL's, tokens are exact, slots are ours.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return SkyrlGenerator("terminal_tasks", tokenizer, inference_engine_client)

Rows of the dataset are those of `skyrl_rows`. With `generator.step_wise_trajectories` every segment of a rollout is a
step; without it set `env.segments` to `last` or `forbid`. A rollout that infrastructure ended raises, and ends the
step: SkyRL has no place for it, and it is never a reward.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput

from agent_loop.model.backends.backend import Generation
from agent_loop.model.contract import ModelRefused, ModelUnavailable, Sampling
from environments.rollouts.samples import Sample
from environments.trainers.one_by_one import opened


class SkyrlBackend:
    """SkyRL's inference client as a token backend: one rollout, so that its turns stay on one engine."""

    def __init__(self, client: Any, sampling_params: dict[str, Any]) -> None:
        self._client, self._given = client, sampling_params
        self._session = uuid.uuid4().hex

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        """Sample one continuation as SkyRL's config says; the length of the turn and where it ends are ours."""
        given = {key: value for key, value in self._given.items() if key not in ("max_generate_length", "stop")}
        given |= {"max_tokens": sampling.max_tokens, "stop_token_ids": list(stop_ids), "logprobs": 0}
        made = await self._client.generate(
            {"prompt_token_ids": [list(prompt_ids)], "sampling_params": given, "session_ids": [self._session]}
        )
        [ids], [reason] = made["response_ids"], made["stop_reasons"]
        if reason == "abort":
            raise ModelUnavailable("SkyRL aborted the request, as it does when weights change")
        logprobs = (made.get("response_logprobs") or [None])[0]
        if logprobs is None or len(logprobs) != len(ids):
            raise ModelRefused("SkyRL gave no logprobs: set generator.sampling_params.logprobs to 0")
        return Generation(list(ids), list(logprobs), reason)

    async def context_tokens(self) -> int | None:
        """SkyRL does not tell."""

    async def close(self) -> None:
        """The client is SkyRL's."""


class SkyrlGenerator(GeneratorInterface):  # type: ignore[misc]
    """Rolls out the items of a batch."""

    def __init__(
        self, environment: str, tokenizer: Any, client: Any, settings: Sequence[str] = (), *, step_wise: bool = False
    ) -> None:
        """`step_wise` is `generator.step_wise_trajectories` of SkyRL's config."""
        self._source, self._tokenizer = (environment, list(settings)), tokenizer
        self._client, self._step_wise = client, step_wise

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        rollouts = await opened(*self._source, self._tokenizer, one_sequence=not self._step_wise)
        params = dict(input_batch.get("sampling_params") or {})

        async def one(extra: dict[str, Any]) -> list[Sample]:
            backend = SkyrlBackend(self._client, params)
            return await rollouts.roll_out(extra["item"], backend, params.get("temperature"))

        rows = await asyncio.gather(*(one(extra) for extra in input_batch["env_extras"] or ()))
        return skyrl_output(rows, input_batch["trajectory_ids"] if self._step_wise else None)


def skyrl_output(rows: Sequence[Sequence[Sample]], trajectories: Sequence[Any] | None) -> GeneratorOutput:
    """Rollouts as SkyRL's batch, in order; with `trajectories` each segment is a step, and the last one is marked."""
    samples = [sample for row in rows for sample in row]
    output: dict[str, Any] = {
        "prompt_token_ids": [sample.tokens[: sample.prompt_len] for sample in samples],
        "response_ids": [sample.tokens[sample.prompt_len :] for sample in samples],
        "loss_masks": [sample.mask[sample.prompt_len :] for sample in samples],
        "rollout_logprobs": [sample.logprobs[sample.prompt_len :] for sample in samples],
        "rewards": [sample.reward for sample in samples],
        "stop_reasons": [sample.record.outcome for sample in samples],
        "rollout_metrics": _means([row[-1].record.metrics for row in rows]),
        "trajectory_generation_times": [row[-1].record.timing.get("total_s", 0.0) for row in rows],
    }
    if trajectories is not None:
        output["trajectory_ids"] = [which for row, which in zip(rows, trajectories, strict=True) for _ in row]
        output["is_last_step"] = [sample.last for sample in samples]
    return GeneratorOutput(**output)


def _means(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    names = {name for own in metrics for name in own}
    return {f"hermes/{name}": sum(own.get(name, 0.0) for own in metrics) / len(metrics) for name in sorted(names)}
