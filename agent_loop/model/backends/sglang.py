"""SGLang's native `/generate`: ids in, ids and logprobs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_loop.model.backends.backend import Generation
from agent_loop.model.backends.http import HttpBackend, field
from agent_loop.model.backends.vllm import GENEROUS_MAX_TOKENS
from agent_loop.model.contract import Sampling


class SGLangBackend(HttpBackend):
    """An SGLang server."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        """Sample one continuation."""
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_new_tokens": GENEROUS_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if stop_ids:
            params["stop_token_ids"] = list(stop_ids)
        body = {
            "input_ids": prompt_ids,
            "sampling_params": params | dict(sampling.extra_body),
            "return_logprob": True,
            "return_text_in_logprobs": False,
        }
        answer = _single(await self._http.post("/generate", body))
        info = field(answer, "meta_info")
        rows = field(info, "output_token_logprobs")
        reason = info.get("finish_reason") or {}
        finish = reason.get("type") if isinstance(reason, dict) else reason
        version = info.get("weight_version")
        return Generation(
            [int(row[1]) for row in rows],
            [row[0] for row in rows],
            str(finish or "abort"),
            None if version is None else str(version),
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


def _single(answer: Any) -> Any:
    return answer[0] if isinstance(answer, list) and answer else answer
