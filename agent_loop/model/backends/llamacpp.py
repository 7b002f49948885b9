"""llama.cpp's own `/completion`: ids in, ids and logprobs out.

The logprobs are the model's, before temperature and filters. When a generation ends inside a UTF-8 character the server
gives fewer probabilities than tokens: such a token has no logprob here (None), and its neighbours keep their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agent_loop.model.backends.backend import Generation
from agent_loop.model.backends.http import HttpBackend, entropies, field
from agent_loop.model.contract import ModelRefused, Sampling

FINISH = {"eos": "stop", "word": "stop", "limit": "length"}
NEUTRAL = {
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "dynatemp_range": 0.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
}
"""Sent with every request: the server's own defaults are those of its command line."""
FIRST_GUESS = 1000
"""Probabilities asked for at first when scoring: sampled tokens are nearly always among the likeliest few."""
WHOLE_VOCABULARY = 1_000_000


class LlamaCppBackend(HttpBackend):
    """A llama.cpp server."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._plain_token: int | None = None
        self._scoring = asyncio.Lock()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        """Sample one continuation; `stop_ids` are the model file's own end-of-generation tokens, whatever is given."""
        body: dict[str, Any] = {
            "prompt": prompt_ids,
            "n_predict": -1 if sampling.max_tokens is None else sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_k": 0,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "min_p": 0.0,
            **NEUTRAL,
            "n_probs": 1,
            "return_tokens": True,
            "cache_prompt": True,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        answer = await self._http.post("/completion", body | dict(sampling.extra_body))
        ids = field(answer, "tokens")
        entries = answer.get("completion_probabilities") or []
        if any("logprob" not in entry for entry in entries):
            raise ModelRefused("post_sampling_probs gives the sampler's probabilities, not the model's: leave it out")
        logprobs = align([e["id"] for e in entries], [e["logprob"] for e in entries], ids)
        told = entropies([top["logprob"] for top in entry.get("top_logprobs") or ()] for entry in entries)
        stop = field(answer, "stop_type")
        return Generation(
            ids,
            logprobs,
            FINISH.get(stop, stop or "abort"),
            weights_version(answer.get("model")),
            entropies=align([e["id"] for e in entries], told, ids) if told else [],
        )

    async def score(self, ids: Sequence[int], positions: Sequence[int]) -> list[float]:
        """One request per position, in order, so that each reads only what the one before had not read."""
        async with self._scoring:  # questions about another sequence in between would empty the server's cache
            if self._plain_token is None:
                self._plain_token = int(field(await self._http.post("/tokenize", {"content": "a"}), "tokens", 0))
            scores = {p: await self._score_one(list(ids[:p]), ids[p]) for p in sorted(set(positions))}
        return [scores[p] for p in positions]

    async def _score_one(self, prefix: list[int], token: int) -> float:
        for wanted in (FIRST_GUESS, WHOLE_VOCABULARY):
            body = {
                "prompt": prefix,
                "n_predict": 1,
                # What is sampled does not matter, but inside a character no probabilities would come: sample a letter.
                "temperature": 0.0,
                "logit_bias": [[self._plain_token, 1000.0]],
                "n_probs": wanted,
                "cache_prompt": True,
            }
            answer = await self._http.post("/completion", body)
            for entry in field(answer, "completion_probabilities", 0, "top_logprobs"):
                if entry["id"] == token:
                    return float(entry["logprob"])
        raise ModelRefused(f"the server gives no logprob for token {token}: not its vocabulary?")

    async def context_tokens(self) -> int | None:
        """The context of one slot: the server's whole context is shared out among them."""
        try:
            return int(field(await self._http.get("/props"), "default_generation_settings", "n_ctx"))
        except ModelRefused:
            return await super().context_tokens()


def weights_version(model: Any) -> str | None:
    """VERSION of a model that is called NAME@VERSION, as our own servers with changing weights are."""
    return model.rpartition("@")[2] if isinstance(model, str) and "@" in model else None


def align(ids: Sequence[int], logprobs: Sequence[float | None], tokens: Sequence[int]) -> list[float | None]:
    """Give each token its own value; where an id is missing and its place is not certain, nothing is given."""
    if list(ids) == list(tokens):
        return list(logprobs)
    first, last = _embed(ids, tokens), _embed(ids[::-1], tokens[::-1])  # a place is certain when both agree
    if first is None or last is None:
        raise ModelRefused("the server's probabilities are not those of the tokens it sampled")
    last = [len(tokens) - 1 - place for place in reversed(last)]
    aligned: list[float | None] = [None] * len(tokens)
    for place, other, logprob in zip(first, last, logprobs, strict=True):
        if place == other:
            aligned[place] = logprob
    return aligned


def _embed(part: Sequence[int], whole: Sequence[int]) -> list[int] | None:
    """Leftmost places at which `part` stands, in order, inside `whole`."""
    places: list[int] = []
    position = 0
    for item in part:
        while position < len(whole) and whole[position] != item:
            position += 1
        if position == len(whole):
            return None
        places.append(position)
        position += 1
    return places
