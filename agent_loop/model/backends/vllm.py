"""vLLM in its three dialects.

`VllmBackend` is a stock server's `/v1/completions` with `return_token_ids`: no flag needed. `VllmScaleOutBackend` is
its `/inference/v1/generate` (needs `--enable-scale-out` since 0.32) and says which weights sampled each token.
`VllmGenerateBackend` is the `/generate` of the small servers that trainers ship.

The logprobs are the model's at every temperature, as long as the server keeps its `--logprobs-mode raw_logprobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from agent_loop.model.backends.backend import Generation, weights_spans
from agent_loop.model.backends.http import Echo, HttpBackend, entropies, field
from agent_loop.model.contract import ModelRefused, Sampling

GENEROUS_MAX_TOKENS = 4096
"""Sent when the caller sets no limit: vLLM's own default is 16."""


class _Vllm(HttpBackend):
    async def _model_name(self) -> str:
        if self._model is None:
            self._model = str(field(await self._http.get("/v1/models"), "data", 0, "id"))
        return self._model


class VllmBackend(_Vllm):
    """Stock vLLM, `/v1/completions`."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        """Sample one continuation."""
        ids_json = orjson.dumps(prompt_ids)
        body = sampling_params(sampling, stop_ids) | {
            "model": await self._model_name(),
            "prompt": orjson.Fragment(ids_json),
            "logprobs": 1,
            "return_token_ids": True,
        }
        echo = Echo("prompt_token_ids", ids_json)
        answer = await self._http.post("/v1/completions", body | dict(sampling.extra_body), echo=echo)
        choice = field(answer, "choices", 0)
        ids = field(choice, "token_ids")
        logprobs = field(choice, "logprobs", "token_logprobs")
        _same_length(ids, logprobs)
        tops = choice["logprobs"].get("top_logprobs") or ()
        told = entropies((top or {}).values() for top in tops)
        return Generation(ids, logprobs, str(field(choice, "finish_reason") or "abort"), entropies=told)

    async def score(self, ids: Sequence[int], positions: Sequence[int]) -> list[float]:
        """The whole sequence as a prompt, once, with its own logprobs."""
        body = {
            "model": await self._model_name(),
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        choice = field(await self._http.post("/v1/completions", body), "choices", 0)
        rows = field(choice, "prompt_logprobs")
        return [float(field(rows, p, str(ids[p]), "logprob")) for p in positions]


class VllmScaleOutBackend(_Vllm):
    """Stock vLLM, `/inference/v1/generate`."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        """Sample one continuation."""
        params = sampling_params(sampling, stop_ids) | {"logprobs": 0} | dict(sampling.extra_body)
        body = {"model": await self._model_name(), "token_ids": prompt_ids, "sampling_params": params}
        choice = field(await self._http.post("/inference/v1/generate", body), "choices", 0)
        ids = field(choice, "token_ids")
        rows = field(choice, "logprobs", "content")
        logprobs = [row["logprob"] for row in rows if "logprob" in row]
        _same_length(ids, logprobs)
        spans = weights_spans(choice.get("weight_versions"), len(ids))
        version = spans[0].version if spans else None
        told = entropies([top["logprob"] for top in row.get("top_logprobs") or ()] for row in rows if "logprob" in row)
        return Generation(ids, logprobs, str(field(choice, "finish_reason") or "abort"), version, spans, told)


class VllmGenerateBackend(HttpBackend):
    """The `/generate` contract of atroposlib's example server and others like it."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        """Sample one continuation."""
        body = sampling_params(sampling, stop_ids) | {"prompt": {"prompt_token_ids": prompt_ids}, "logprobs": 0}
        answer = await self._http.post("/generate", body | dict(sampling.extra_body))
        rows = field(answer, "logprobs", 0)
        pairs = [next(iter(field(row, 0).items())) for row in rows]
        ids = [int(token) for token, _ in pairs]
        return Generation(ids, [p for _, p in pairs], str(field(answer, "finish_reasons", 0) or "abort"))


def sampling_params(sampling: Sampling, stop_ids: Sequence[int]) -> dict[str, Any]:
    """SamplingParams by the names that vLLM gives them; nothing that changes the distribution is left to a default."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_tokens": GENEROUS_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if sampling.stop:
        params |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    if stop_ids:
        params["stop_token_ids"] = list(stop_ids)
    return params


def _same_length(ids: Sequence[int], logprobs: Sequence[float]) -> None:
    if len(ids) != len(logprobs):
        raise ModelRefused(f"the server gave {len(logprobs)} logprobs for {len(ids)} tokens")
