"""SGLang's native `/generate`: ids in, ids and logprobs out.

Its logprobs are the sampler's: of the distribution after temperature, penalties, biases and grammars. At temperature 0
and 1 without any of these they are the model's own, which is what is stored here. At other temperatures they are so
only on servers that were started with `SGLANG_RETURN_ORIGINAL_LOGPROB=1`, which no address tells: it is measured once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.model.backends.backend import Generation, weights_spans
from agent_loop.model.backends.http import HttpBackend, entropies, field
from agent_loop.model.backends.vllm import GENEROUS_MAX_TOKENS
from agent_loop.model.contract import ModelRefused, Sampling

NEUTRAL: Mapping[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""Sent with every request: a server may have others for its own (`--preferred-sampling-params`)."""
CHANGES_LOGPROBS = frozenset(
    (*NEUTRAL, "logit_bias", "json_schema", "regex", "ebnf", "structural_tag", "custom_logit_processor", "watermark")
)
"""Settings that SGLang works into the logits before it takes any logprob, the model's own too."""
TOP_LEVEL = frozenset(
    (
        "lora_path", "lora_id", "rid", "session_id", "session_params", "conversation_id", "priority", "extra_key",
        "routing_key", "routed_dp_rank", "data_parallel_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "custom_logit_processor", "watermark", "require_reasoning", "max_thinking_tokens", "custom_labels", "no_logs",
        "log_metrics", "external_trace_header", "return_routed_experts", "return_hidden_states", "return_entropy",
        "return_sampling_mask", "sampling_logprobs_mode", "top_logprobs_num", "token_ids_logprob",
    )
)  # fmt: skip
"""Fields of `GenerateReqInput` that an `extra_body` may hold; what is not one of them belongs to `sampling_params`."""
COLD = 0.05
"""A temperature at which the likeliest token is sampled, and at which the sampler is nearly sure of it."""
PROBES = 8
UNSURE = -0.3
"""The model's logprob of a token that tells the two apart: the sampler's is near 0 then."""


class SGLangBackend(HttpBackend):
    """An SGLang server."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._asking = asyncio.Lock()
        self._gives_the_models: bool | None = None
        self._deterministic: bool | None = None

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        """Sample one continuation; raises ModelRefused where the logprobs would not be the model's."""
        temperature = sampling.extra_body.get("temperature", sampling.temperature)
        for name in sorted(CHANGES_LOGPROBS & set(sampling.extra_body)):
            if sampling.extra_body[name] != NEUTRAL.get(name):
                raise ModelRefused(f"{name}: SGLang then gives logprobs that are not the model's; leave it out")
        if temperature not in (0.0, 1.0) and not await self._gives_model_logprobs(prompt_ids):
            raise ModelRefused(
                f"at temperature {temperature} this SGLang server gives the sampler's logprobs, not the model's: start "
                "it with SGLANG_RETURN_ORIGINAL_LOGPROB=1, or sample at temperature 1"
            )
        return await self._sample(prompt_ids, sampling, stop_ids)

    async def _sample(self, prompt_ids: list[int], sampling: Sampling, stop_ids: Sequence[int] = ()) -> Generation:
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_new_tokens": GENEROUS_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            **NEUTRAL,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if sampling.seed is not None and await self._seeds_count():
            params["sampling_seed"] = sampling.seed
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if stop_ids:
            params["stop_token_ids"] = list(stop_ids)
        extra = sampling.extra_body
        body = {
            "input_ids": prompt_ids,
            "sampling_params": params | {key: value for key, value in extra.items() if key not in TOP_LEVEL},
            "return_logprob": True,
            "return_text_in_logprobs": False,
        }
        body |= {key: value for key, value in extra.items() if key in TOP_LEVEL}
        answer = _single(await self._http.post("/generate", body))
        info = field(answer, "meta_info")
        rows = field(info, "output_token_logprobs")
        reason = info.get("finish_reason") or {}
        finish = reason.get("type") if isinstance(reason, dict) else reason
        spans = weights_spans(info.get("weight_versions"), len(rows))
        version = spans[0].version if spans else info.get("weight_version")
        return Generation(
            [int(row[1]) for row in rows],
            [row[0] for row in rows],
            str(finish or "abort"),
            None if version is None else str(version),
            spans,
            entropies([top[0] for top in row or ()] for row in info.get("output_top_logprobs") or ()),
        )

    async def score(self, ids: Sequence[int], positions: Sequence[int]) -> list[float]:
        """The whole sequence as a prompt, once, with its own logprobs."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = _single(await self._http.post("/generate", body))
        rows = field(answer, "meta_info", "input_token_logprobs")
        return [float(field(rows, p, 0)) for p in positions]

    async def _seeds_count(self) -> bool:
        """Whether the server samples by seed at all; says so once when it does not."""
        async with self._asking:
            if self._deterministic is None:
                try:
                    info = await self._http.get("/server_info")
                except ModelRefused:
                    info = {}
                self._deterministic = isinstance(info, dict) and info.get("enable_deterministic_inference") is True
                if not self._deterministic:
                    logging.getLogger(__name__).warning(
                        "%s ignores seeds: start SGLang with --enable-deterministic-inference", self._http.url
                    )
        return self._deterministic

    async def _gives_model_logprobs(self, prompt_ids: list[int]) -> bool:
        """Whether logprobs leave the temperature out; what could not be told is asked again another time."""
        async with self._asking:
            if self._gives_the_models is None:
                lengths = {max(1, len(prompt_ids) * part // PROBES) for part in range(1, PROBES + 1)}
                votes = [await self._looks_like_the_models(prompt_ids[:n]) for n in sorted(lengths, reverse=True)]
                told = [vote for vote in votes if vote is not None]
                self._gives_the_models = all(told) if told else None
        return bool(self._gives_the_models)

    async def _looks_like_the_models(self, prompt_ids: list[int]) -> bool | None:
        """The likeliest next token, cold and without temperature: only the model's logprob of it is the same."""
        greedy = await self._sample(prompt_ids, Sampling(temperature=0.0, max_tokens=1))
        cold = await self._sample(prompt_ids, Sampling(temperature=COLD, max_tokens=1))
        models, shown = (generation.logprobs[0] if generation.logprobs else None for generation in (greedy, cold))
        if greedy.token_ids != cold.token_ids or models is None or shown is None or models > UNSURE:
            return None
        return abs(models - shown) < 0.1 * abs(models)


def _single(answer: Any) -> Any:
    return answer[0] if isinstance(answer, list) and answer else answer
