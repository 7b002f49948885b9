"""The stand-in server: one way from a prompt to a sample, and the endpoints of OpenAI, vLLM, SGLang and llama.cpp over
it, each in its own words.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import orjson
from aiohttp import web

from agent_loop.local_models.standin.chatml import chatml_tokenizer
from agent_loop.local_models.standin.policies import Fault, Policy, PolicyRequest, good, settle
from agent_loop.local_models.standin.sampler import Sample, Writer, fingerprint, logprobs_of
from agent_loop.model.tokens.message_shape import MessageShape, shape_messages
from agent_loop.model.tokens.template import Tokenizer
from tool_parsers import get_parser

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
        app.add_routes(_routes(self))
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


MODEL = "stand-in"
Handler = Callable[["StandIn", str, dict[str, Any]], Awaitable[Any]]


def _routes(server: StandIn) -> list[web.RouteDef]:
    """Every endpoint, bound to one server."""
    posts: dict[str, Handler] = {
        "/v1/chat/completions": _chat,
        "/v1/completions": _completions,
        "/inference/v1/generate": _scale_out,
        "/generate": _generate,
        "/completion": _llamacpp,
        "/tokenize": _tokenize,
        "/detokenize": _detokenize,
    }
    card = {"id": MODEL, "object": "model", "max_model_len": server.context_tokens}
    gets: dict[str, Any] = {
        "/health": {"status": "ok"},
        "/version": {"version": MODEL},
        "/v1/models": {"object": "list", "data": [card]},
    }
    fixed = [web.get(path, _fixed(answer)) for path, answer in gets.items()]
    return [*fixed, *(web.post(path, _endpoint(server, path, handler)) for path, handler in posts.items())]


def _fixed(answer: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_: web.Request) -> web.Response:
        """The same answer every time."""
        return _json(answer)

    return handle


def _endpoint(server: StandIn, path: str, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        """One request, with its faults as HTTP."""
        try:
            body = orjson.loads(await request.read())
            return _json(await handler(server, path, body))
        except Fault as fault:
            if fault.status == 0 and request.transport is not None:
                request.transport.close()
            error = {"message": str(fault), "type": "stand_in", "code": fault.status}
            return _json({"error": error}, status=fault.status or 500)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            message = f"bad request: {type(error).__name__}: {error}"
            return _json({"error": {"message": message, "type": "invalid_request_error", "code": 400}}, status=400)

    return handle


def _json(answer: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(answer), status=status, content_type="application/json")


async def _samples(
    server: StandIn, path: str, ids: Sequence[int], body: dict[str, Any], n: int | None, limit: int | None
) -> list[Sample]:
    most = server.context_tokens if limit is None or limit < 0 else limit
    return [await server.sample(path, ids, body, max_tokens=most, index=index) for index in range(n or 1)]


# -- OpenAI ----------------------------------------------------------------------------------------------------


async def _chat(server: StandIn, path: str, body: dict[str, Any]) -> Any:
    text = server.tokenizer.apply_chat_template(
        shape_messages(body["messages"], MessageShape()),
        tools=body.get("tools") or None,
        add_generation_prompt=True,
        tokenize=False,
    )
    ids = server.tokenizer.encode(text, add_special_tokens=False)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    samples = await _samples(server, path, ids, body, body.get("n"), limit)
    sampled = sum(len(s.ids) for s in samples)
    return {
        "id": f"chatcmpl-{server.requests}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or MODEL,
        "choices": [
            {"index": i, **_chat_choice(s, body.get("tools") or [], server.requests)} for i, s in enumerate(samples)
        ],
        "usage": {"prompt_tokens": len(ids), "completion_tokens": sampled, "total_tokens": len(ids) + sampled},
    }


def _chat_choice(sample: Sample, tools: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """As vLLM with automatic tool choice: clean calls become `tool_calls`, anything else stays text."""
    message: dict[str, Any] = {"role": "assistant", "content": sample.text}
    parsed = get_parser("hermes").parse(sample.text, tools=tools or None)
    clean = bool(parsed.calls) and not parsed.errors and all(c.ok and c.complete for c in parsed.calls)
    if not tools or not clean:
        return {"message": message, "finish_reason": sample.finish_reason}
    message["content"] = parsed.content or None
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    message["tool_calls"] = [
        {
            "id": f"call_{number}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()},
        }
        for index, call in enumerate(parsed.calls)
    ]
    return {"message": message, "finish_reason": "tool_calls" if sample.finish_reason == "stop" else "length"}


async def _completions(server: StandIn, path: str, body: dict[str, Any]) -> Any:
    prompt = body["prompt"]
    ids = server.tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
    if "prompt_logprobs" in body:
        return {"choices": [{"index": 0, "finish_reason": "length", "prompt_logprobs": _prompt_logprobs(ids)}]}
    samples = await _samples(server, path, ids, body, body.get("n"), body.get("max_tokens", 16))
    choices = []
    for index, sample in enumerate(samples):
        choice: dict[str, Any] = {"index": index, "text": sample.text, "finish_reason": sample.finish_reason}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": sample.logprobs}
        if body.get("return_token_ids"):
            choice |= {"token_ids": sample.ids, "prompt_token_ids": ids}
        choices.append(choice)
    return {"id": "cmpl-stand-in", "object": "text_completion", "model": body.get("model"), "choices": choices}


def _prompt_logprobs(ids: Sequence[int]) -> list[dict[str, Any] | None]:
    rows: list[dict[str, Any] | None] = [
        {str(token): {"logprob": logprob, "rank": 1}} for token, logprob in zip(ids, logprobs_of(ids), strict=True)
    ]
    return [None, *rows[1:]]


# -- vLLM and SGLang -------------------------------------------------------------------------------------------


async def _scale_out(server: StandIn, path: str, body: dict[str, Any]) -> Any:
    params = body["sampling_params"]
    samples = await _samples(server, path, body["token_ids"], body, params.get("n"), params.get("max_tokens", 16))
    choices = [
        {
            "index": index,
            "token_ids": sample.ids,
            "finish_reason": sample.finish_reason,
            "logprobs": {
                "content": [{"token_id": t, "logprob": p} for t, p in zip(sample.ids, sample.logprobs, strict=True)]
            },
        }
        for index, sample in enumerate(samples)
    ]
    return {"request_id": f"stand-in-{server.requests}", "choices": choices}


async def _generate(server: StandIn, path: str, body: dict[str, Any]) -> Any:
    return await (_sglang if "input_ids" in body else _vllm_generate)(server, path, body)


async def _vllm_generate(server: StandIn, path: str, body: dict[str, Any]) -> Any:
    ids = body["prompt"]["prompt_token_ids"]
    samples = await _samples(server, path, ids, body, body.get("n"), body.get("max_tokens", 16))
    return {
        "text": [s.text for s in samples],
        "prompt": "",
        "finish_reasons": [s.finish_reason for s in samples],
        "logprobs": [[[{str(t): p}] for t, p in zip(s.ids, s.logprobs, strict=True)] for s in samples],
        "token_ids": [s.ids for s in samples],
        "prompt_token_ids": ids,
    }


async def _sglang(server: StandIn, path: str, body: dict[str, Any]) -> Any:
    ids, params = body["input_ids"], body["sampling_params"]
    if params.get("max_new_tokens") == 0:
        rows = [[p, t, None] for t, p in zip(ids, logprobs_of(ids), strict=True)]
        return {"text": "", "meta_info": {"input_token_logprobs": [[None, ids[0], None], *rows[1:]]}}
    samples = await _samples(server, path, ids, body, params.get("n"), params.get("max_new_tokens", 128))
    answers = [
        {
            "text": s.text,
            "output_ids": s.ids,
            "meta_info": {
                "finish_reason": {"type": s.finish_reason},
                "output_token_logprobs": [[p, t, None] for t, p in zip(s.ids, s.logprobs, strict=True)],
            },
        }
        for s in samples
    ]
    return answers if len(answers) > 1 else answers[0]


# -- llama.cpp -------------------------------------------------------------------------------------------------


async def _llamacpp(server: StandIn, path: str, body: dict[str, Any]) -> Any:
    prompt = body["prompt"]
    ids = server.tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
    samples = await _samples(server, path, ids, body, body.get("n_cmpl"), body.get("n_predict", -1))
    answers = [
        {
            "content": s.text,
            "tokens": s.ids if body.get("return_tokens") else [],
            "stop_type": "eos" if s.finish_reason == "stop" else "limit",
            "completion_probabilities": [{"id": t, "logprob": p} for t, p in zip(s.ids, s.logprobs, strict=True)],
        }
        for s in samples
    ]
    return answers if len(answers) > 1 else answers[0]


async def _tokenize(server: StandIn, path: str, body: dict[str, Any]) -> Any:
    return {"tokens": server.tokenizer.encode(body["content"], add_special_tokens=False)}


async def _detokenize(server: StandIn, path: str, body: dict[str, Any]) -> Any:
    return {"content": server.tokenizer.decode(body["tokens"], skip_special_tokens=False)}
