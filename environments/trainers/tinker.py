"""Tinker: its sampling client samples our rollouts, and our samples are its training data.

    training = await service.create_lora_training_client_async(base_model=MODEL, rank=32)
    backend = TinkerBackend(await training.save_weights_and_get_sampling_client_async())
    async with Rollouts("terminal_tasks", model=backend, tokenizer=training.get_tokenizer()) as rollouts:
        samples = await rollouts.group(item, 8)
        await training.forward_backward_async([tinker_datum(sample) for sample in samples], "importance_sampling")

The same with any server that speaks Tinker's API, such as SkyRL's (`base_url`). Several segments are several data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_loop.model.backends.backend import Generation
from agent_loop.model.contract import ModelRefused, ModelUnavailable, Sampling
from environments.rollouts.samples import Sample

FINISHED = {"stop": "stop", "length": "length"}


class TinkerBackend:
    """`Rollouts(config, model=TinkerBackend(client), tokenizer=tokenizer)`: Tinker samples."""

    def __init__(self, client: Any, *, version: str | None = None, context_tokens: int | None = None) -> None:
        """`client` is a SamplingClient; `version` names its weights in the samples."""
        self._client, self._version = client, version
        self._context_tokens = context_tokens

    def use(self, client: Any, version: str | None = None) -> None:
        """Sample from these weights from now on; turns that are being sampled keep the ones they began with."""
        self._client, self._version = client, version

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        """Sample one continuation."""
        import tinker

        client, version = self._client, self._version
        params = _parameters(sampling, stop_ids)
        prompt = tinker.types.ModelInput.from_ints(list(prompt_ids))
        answer = await _asked(client.sample_async(prompt=prompt, num_samples=1, sampling_params=params))
        [sequence] = answer.sequences
        tokens, logprobs = list(sequence.tokens), sequence.logprobs
        if logprobs is None or len(logprobs) != len(tokens):
            raise ModelRefused(f"Tinker gave {len(tokens)} tokens without a logprob for each")
        finished = FINISHED.get(str(sequence.stop_reason), str(sequence.stop_reason))
        return Generation(tokens, list(logprobs), finished, version)

    async def context_tokens(self) -> int | None:
        """As it was given: sampling clients do not tell."""
        return self._context_tokens

    async def close(self) -> None:
        """The client belongs to whoever made it."""


def _parameters(sampling: Sampling, stop_ids: Sequence[int]) -> Any:
    import tinker

    if sampling.max_tokens is None:
        raise ModelRefused("Tinker wants to know how many tokens a turn may have: set env.max_tokens_per_turn")
    if sampling.stop:
        raise ModelRefused("Tinker stops at tokens or at texts, and the chat template's tokens are needed: set no stop")
    if sampling.extra_body:
        raise ModelRefused(f"Tinker has no {', '.join(sampling.extra_body)}: leave extra_body out")
    return tinker.types.SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        seed=sampling.seed,
        stop=list(stop_ids) or None,
    )


async def _asked(answer: Any) -> Any:
    """Tinker's errors as the loop knows them; its client has already tried again where that may help."""
    import tinker

    try:
        return await answer
    except (tinker.RateLimitError, tinker.ConflictError, tinker.InternalServerError) as error:
        raise ModelUnavailable(f"Tinker: {error}") from error
    except tinker.APIStatusError as error:
        raise ModelRefused(f"Tinker: {error}") from error
    except tinker.TinkerError as error:
        raise ModelUnavailable(f"Tinker: {error}") from error


def tinker_datum(sample: Sample) -> Any:
    """A sample as Tinker's `Datum` for `importance_sampling`, `ppo` and `cispo`: each target is the token after.

    Advantages are 0.0 where nothing was sampled, so nothing is trained there.
    """
    import numpy as np
    import tinker

    if sample.advantage is None:
        raise ValueError("a member without its group has no advantage: ask for groups, or put one into the sample")
    spread = sample.token_advantages or [sample.advantage] * len(sample.mask)
    advantages = [value if trained else 0.0 for value, trained in zip(spread, sample.mask, strict=True)]
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(sample.tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray(sample.tokens[1:], np.int64),
            "logprobs": np.asarray(sample.logprobs[1:], np.float32),
            "advantages": np.asarray(advantages[1:], np.float32),
        },
    )
