"""The stand-in server: life cycle, the log of every request, and the one way from a prompt to a sample."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from aiohttp import web

from agent_loop.local_models.standin import dialects
from agent_loop.local_models.standin.chatml import chatml_tokenizer
from agent_loop.local_models.standin.policies import Fault, Policy, PolicyRequest, good, settle
from agent_loop.local_models.standin.sampler import Sample, Writer, fingerprint
from agent_loop.model.tokens.template import Tokenizer

MAX_REQUEST_BYTES = 1 << 28


@dataclass(frozen=True)
class Exchange:
    """One request and its answer, for replay proofs. Failed requests have a status and no sample."""

    path: str
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    status: int = 200


class StandIn:
    """`async with StandIn(policy) as server: ... server.url ... server.log`."""

    def __init__(
        self,
        policy: Policy = good,
        *,
        tokenizer: Tokenizer | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        seed: int = 0,
        context_tokens: int = 131_072,
        split_share: float = 0.1,
        keep_log: bool = True,
    ) -> None:
        """`split_share` of the tokens are written as two smaller ones, as a sampling model does now and then."""
        self.policy = policy
        self.tokenizer = tokenizer or chatml_tokenizer()
        self.context_tokens = context_tokens
        self.log: list[Exchange] = []
        self.requests = 0
        self._host, self._port, self._seed = host, port, seed
        self._writer = Writer(self.tokenizer, split_share)
        self._keep_log = keep_log
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where the server listens."""
        return f"http://{self._host}:{self._port}"

    async def __aenter__(self) -> StandIn:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.add_routes(dialects.routes(self))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def sample(
        self, path: str, prompt_ids: Sequence[int], body: dict[str, Any], *, max_tokens: int, index: int = 0
    ) -> Sample:
        """Play the policy once; raises Fault. Logged either way."""
        clock = asyncio.get_running_loop().time
        came = clock()
        ids = list(prompt_ids)
        number, self.requests = self.requests, self.requests + 1
        rng = Random(fingerprint(ids, self._seed + index))
        text = partial(self.tokenizer.decode, ids, skip_special_tokens=False)
        try:
            if len(ids) >= self.context_tokens:
                raise Fault(
                    400, f"the prompt has {len(ids)} tokens, the maximum context length is {self.context_tokens}"
                )
            reply = await settle(self.policy(PolicyRequest(text, rng, number, ids, body)))
        except Fault as fault:
            self._note(Exchange(path, ids, [], [], "", fault.status))
            raise
        room = min(max_tokens, self.context_tokens - len(ids))
        sample = self._writer.write(reply, ids, rng, max_tokens=room)
        if reply.delay_s:
            await asyncio.sleep(came + reply.delay_s - clock())
        self._note(Exchange(path, ids, sample.ids, sample.logprobs, sample.finish_reason))
        return sample

    def _note(self, exchange: Exchange) -> None:
        if self._keep_log:
            self.log.append(exchange)
