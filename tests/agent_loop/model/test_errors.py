"""The sentences of servers and gateways, each with where it was found, and what each must mean.

Where no report with the very words was found, the row says "wording assumed".

Every row is asked for over real HTTP, through the chat client and through every token backend: all must agree.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from openai import AsyncOpenAI

from agent_loop.model.backends import BACKENDS
from agent_loop.model.chat import ChatServer
from agent_loop.model.contract import ContextTooLong, ModelError, ModelRefused, ModelUnavailable, Sampling
from agent_loop.model.errors import translate


def openai_error(message: str, kind: str = "invalid_request_error", code: Any = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def vllm_error(message: str) -> dict[str, Any]:
    """vLLM up to 0.9 and SGLang: no `error` around it."""
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}


def anthropic_error(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


TOO_LONG: dict[str, tuple[int, Any]] = {
    # vllm-project/vllm#20409
    "vLLM 0.9, messages and completion": (
        400,
        vllm_error(
            "This model's maximum context length is 16384 tokens. However, you requested 122946 tokens (112946 in the "
            "messages, 10000 in the completion). Please reduce the length of the messages or completion."
        ),
    ),
    # harbor-framework/harbor#996
    "vLLM 0.16": (
        400,
        openai_error(
            "You passed 1015 input tokens and requested 10 output tokens. However, the model's context length is only "
            "1024 tokens, resulting in a maximum input length of 1014 tokens. Please reduce the length of the input "
            "prompt. (parameter=input_tokens, value=1015)",
            "BadRequestError",
            400,
        ),
    ),
    # linagora/openrag#128
    "vLLM, the engine's own check": (
        400,
        vllm_error(
            "The decoder prompt (length 15983) is longer than the maximum model length of 8192. Make sure that "
            "`max_model_len` is no smaller than the number of text tokens plus multimodal tokens."
        ),
    ),
    # vllm-project/vllm#4667: the prompt alone was longer than the context
    "vLLM, no room left": (400, vllm_error("max_tokens must be at least 1, got -186.")),
    # QwenLM/Qwen3#1321
    "SGLang, the prompt": (
        400,
        vllm_error("The input (61709 tokens) is longer than the model's context length (40960 tokens)."),
    ),
    # sglang 0.5.23, srt/managers/tokenizer_manager.py
    "SGLang, prompt and completion": (
        400,
        openai_error(
            "Requested token count exceeds the model's maximum context length of 64000 tokens. You requested a total "
            "of 71897 tokens: 7897 tokens from the input messages and 64000 tokens for the completion. Please reduce "
            "the number of tokens in the input messages or the completion to fit within the limit."
        ),
    ),
    # sgl-project/sglang#4048: less memory than the context would need
    "SGLang, the cache": (
        400,
        openai_error("Input length (160062 tokens) exceeds the maximum allowed length (59862 tokens)."),
    ),
    # arbs-io/github-copilot-llm-gateway#73
    "llama.cpp in 2026": (
        400,
        {
            "error": {
                "code": 400,
                "message": "request (8708 tokens) exceeds the available context size (8192 tokens), try increasing it",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 8708,
                "n_ctx": 8192,
            }
        },
    ),
    # oobabooga/textgen#7257
    "llama.cpp": (
        400,
        {
            "error": {
                "code": 400,
                "message": "the request exceeds the available context size. try increasing the context size or enable "
                "context shift",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 14429,
                "n_ctx": 8192,
            }
        },
    ),
    # ggml-org/llama.cpp#15780
    "llama.cpp before October 2025": (
        500,
        {
            "error": {
                "code": 500,
                "message": "the request exceeds the available context size. try increasing the context size or enable "
                "context shift",
                "type": "exceed_context_size_error",
            }
        },
    ),
    # Nutlope/aicommits#259
    "OpenAI": (
        400,
        openai_error(
            "This model's maximum context length is 4097 tokens. However, your messages resulted in 35569 tokens. "
            "Please reduce the length of the messages.",
            code="context_length_exceeded",
        ),
    ),
    # cline/cline#5474
    "OpenAI, GPT-5": (
        400,
        openai_error(
            "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 289650 tokens. "
            "Please reduce the length of the messages."
        ),
    ),
    # entropy-research/Devon#88
    "Anthropic": (400, anthropic_error("prompt is too long: 209353 tokens > 199999 maximum")),
    # docker/docker-agent#569
    "Anthropic, prompt and completion": (
        400,
        anthropic_error(
            "input length and `max_tokens` exceed context limit: 178959 + 64000 > 200000, decrease input length or "
            "`max_tokens` and try again"
        ),
    ),
    # anthropics/claude-code#6368
    "Anthropic, with 413": (413, anthropic_error("Request size exceeds model context window")),
    # entropy-research/Devon#88: what a gateway makes of it
    "LiteLLM": (
        400,
        openai_error(
            'litellm.BadRequestError: litellm.ContextWindowExceededError: AnthropicError - {"type":"error","error":'
            '{"type":"invalid_request_error","message":"prompt is too long: 209353 tokens > 199999 maximum"}}'
        ),
    ),
    # aws-samples/assessment-generator#2
    "Bedrock": (400, {"message": "Input is too long for requested model."}),
    # google-gemini/gemini-cli#6678
    "Gemini": (
        400,
        openai_error(
            "The input token count (1200293) exceeds the maximum number of tokens allowed (1048576).", code=400
        ),
    ),
    # huggingface/huggingface_hub#2763
    "TGI": (
        422,
        {
            "error": {
                "message": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 8740 "
                "`inputs` tokens and 500 `max_new_tokens`",
                "http_status_code": 422,
            }
        },
    ),
}

LATER: dict[str, tuple[int, Any]] = {
    # wording assumed
    "a gateway's timeout": (408, openai_error("Request timed out.", "timeout_error")),
    # openai/_base_client.py, _should_retry: "Retry on lock timeouts"; wording assumed
    "a lock": (409, openai_error("The resource is locked.")),
    "too early": (425, ""),
    # FoundationAgents/MetaGPT#523; type and code as in TheR1D/shell_gpt#653
    "OpenAI's rate limit": (
        429,
        openai_error(
            "Rate limit reached for gpt-4 in organization org-x on tokens per min (TPM): Limit 10000, Used 8554, "
            "Requested 3082. Please try again in 9.816s. Visit https://platform.openai.com/account/rate-limits to "
            "learn more.",
            "tokens",
            "rate_limit_exceeded",
        ),
    ),
    # ranxianglei/billion-context-pi#169, RooCodeInc/Roo-Code#5050: these are not the prompt's tokens
    "Bedrock's rate limit": (429, {"message": "Too many tokens, please wait before trying again."}),
    # vllm 0.32, v1/engine/exceptions.py
    "vLLM's engine died": (
        500,
        openai_error("EngineCore encountered an issue. See stack trace (above) for the root cause.", code=500),
    ),
    # nginx, ngx_http_special_response.c
    "nginx without a server behind it": (502, "<html><head><title>502 Bad Gateway</title></head></html>"),
    # mostlygeek/llama-swap#146: while the model is loaded
    "llama.cpp loads": (503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}),
    # THUDM/slime#1328
    "SGLang's router without workers": (
        503,
        {
            "error": {
                "type": "Service Unavailable",
                "code": "no_available_workers",
                "message": "No available workers (all circuits open or unhealthy)",
            }
        },
    ),
    # anthropics/claude-code#3572
    "Anthropic is overloaded": (529, anthropic_error("Overloaded", "overloaded_error")),
}

REFUSED: dict[str, tuple[int, Any]] = {
    # nginx, client_max_body_size: bytes, whatever the model's context
    "nginx": (413, "<html><head><title>413 Request Entity Too Large</title></head></html>"),
    # anthropics/anthropic-sdk-python#938: 32 MB
    "Anthropic, in bytes": (
        413,
        {"error": {"type": "request_too_large", "message": "Request exceeds the maximum size"}},
    ),
    # wording assumed
    "a wrong key": (401, openai_error("Incorrect API key provided: x.", code="invalid_api_key")),
    "no permission": (403, ""),
    # vllm 0.32, entrypoints/openai/models/serving.py
    "an unknown model": (404, vllm_error("The model `m` does not exist.")),
    # wording assumed; shortening the prompt would not help
    "too large an answer was asked for": (
        400,
        anthropic_error("max_tokens: 10000 > 4096, which is the maximum allowed number of output tokens for claude-3"),
    ),
    # wording assumed
    "a wrong value": (400, vllm_error("temperature must be non-negative, got -1.0.")),
    # FastAPI; wording assumed
    "a wrong type": (422, {"detail": [{"loc": ["body", "max_tokens"], "msg": "Input should be a valid integer"}]}),
}

ROWS = [
    pytest.param(status, body, error, id=name)
    for rows, error in ((TOO_LONG, ContextTooLong), (LATER, ModelUnavailable), (REFUSED, ModelRefused))
    for name, (status, body) in rows.items()
]


@asynccontextmanager
async def answering(status: int, body: Any) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        if isinstance(body, str):
            return web.Response(text=body, status=status, content_type="text/html", headers={"Retry-After": "3"})
        return web.json_response(body, status=status, headers={"Retry-After": "3"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def ask(url: str, kind: str) -> None:
    if kind == "chat":
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
            await ChatServer(client, "m").open([{"role": "user", "content": "hi"}], []).sample(Sampling())
        return
    backend = BACKENDS[kind](url)
    try:
        await backend.generate([1, 2], Sampling())
    finally:
        await backend.close()


@pytest.mark.parametrize(("status", "body", "error"), ROWS)
async def test_chat_and_token_servers_agree_on_what_an_error_means(status, body, error):
    async with answering(status, body) as url:
        for kind in ("chat", *BACKENDS):
            with pytest.raises(ModelError) as caught:
                await ask(url, kind)
            assert type(caught.value) is error
            if error is ModelUnavailable:
                assert caught.value.retry_after_s == 3.0


@pytest.mark.parametrize(
    ("code", "message", "error"),
    [
        (400, "the request exceeds the available context size", ContextTooLong),
        (429, "Rate limit exceeded", ModelUnavailable),
        ("rate_limited", "slow down", ModelRefused),
    ],
)
async def test_an_error_inside_an_answer_with_status_200_is_an_error(code, message, error):
    """OpenRouter answers so, and llama.cpp after it began to stream."""
    async with answering(200, {"error": {"code": code, "message": message}}) as url:
        for kind in ("chat", *BACKENDS):
            with pytest.raises(ModelError, match=message) as caught:
                await ask(url, kind)
            assert type(caught.value) is error


@pytest.mark.parametrize(("status", "body", "error"), ROWS)
def test_an_exception_with_a_status_means_the_same_whatever_library_raised_it(status, body, error):
    for name in ("status", "status_code"):
        raised = type("AnyError", (Exception,), {name: status})(str(body))
        assert type(translate(raised)) is error


def test_a_prompt_that_speaks_of_context_lengths_is_not_too_long_because_the_server_repeats_it():
    repeated = {"detail": [{"msg": "Field required"}], "input": "x" * 3000 + "maximum context length"}
    assert type(translate(type("AnyError", (Exception,), {"status": 422})(str(repeated)))) is ModelRefused
