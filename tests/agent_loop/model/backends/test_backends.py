"""Every backend brings its server to one interface, and tells a fault from a refusal."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import assume, given
from hypothesis import strategies as st

from agent_loop.local_models.standin import Fault, StandIn
from agent_loop.local_models.standin.sampler import logprobs_of
from agent_loop.model.backends import BACKENDS, LlamaCppBackend, Scorer, SGLangBackend, VllmBackend, connect
from agent_loop.model.backends.llamacpp import align
from agent_loop.model.backends.vllm import VllmGenerateBackend, VllmScaleOutBackend
from agent_loop.model.contract import ContextTooLong, ModelRefused, ModelUnavailable, Sampling, WeightsSpan

PROMPT = [1, 300, 301, 2]


class Recording:
    """A server that gives one answer to everything and keeps what it was asked."""

    def __init__(self, answer: Any, status: int = 200) -> None:
        self.answer, self.status = answer, status
        self.asked: list[tuple[str, Any]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.method == "POST" else None
        self.asked.append((request.path, body))
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        if isinstance(self.answer, str):
            return web.Response(text=self.answer, status=self.status)
        return web.json_response(self.answer, status=self.status)


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    runners = []

    async def start(answer: Any, status: int = 200) -> Recording:
        server = Recording(answer, status)
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", server.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
        return server

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.mark.parametrize("kind", BACKENDS)
async def test_ids_go_in_and_ids_and_logprobs_come_out(kind):
    async with StandIn(lambda _: "hello there", split_share=0.0) as server:
        backend = BACKENDS[kind](server.url)
        generation = await backend.generate(PROMPT, Sampling(max_tokens=50))
        await backend.close()
        assert generation.token_ids == [*server.tokenizer.encode("hello there"), 2]
        assert generation.logprobs == pytest.approx(logprobs_of(generation.token_ids, PROMPT))
        assert generation.finish_reason == "stop"
        assert server.log[0].prompt_ids == PROMPT


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_turn_cut_by_the_token_limit_says_length(kind):
    async with StandIn(lambda _: "one two three four") as server:
        backend = BACKENDS[kind](server.url)
        generation = await backend.generate(PROMPT, Sampling(max_tokens=2))
        await backend.close()
    assert (len(generation.token_ids), generation.finish_reason) == (2, "length")


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(
    ("status", "error"),
    [
        (0, ModelUnavailable),
        (429, ModelUnavailable),
        (500, ModelUnavailable),
        (503, ModelUnavailable),
        (400, ModelRefused),
    ],
)
async def test_faults_of_the_transport_and_refusals_are_told_apart(kind, status, error):
    def policy(_):
        raise Fault(status)

    async with StandIn(policy) as server:
        backend = BACKENDS[kind](server.url)
        with pytest.raises(error) as caught:
            await backend.generate(PROMPT, Sampling())
        await backend.close()
    assert isinstance(caught.value, ModelRefused) == (status == 400)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_prompt_beyond_the_context_is_told_as_such(kind):
    async with StandIn(context_tokens=3) as server:
        backend = BACKENDS[kind](server.url)
        with pytest.raises(ContextTooLong):
            await backend.generate(PROMPT, Sampling())
        await backend.close()


@pytest.mark.parametrize(
    "message",
    [
        '{"error":{"message":"the request exceeds the available context size","type":"exceed_context_size_error"}}',
        '{"message":"This model\'s maximum context length is 4096 tokens. However, you requested 5000 tokens"}',
        '{"error":{"message":"The input (9000 tokens) is longer than the model\'s context length (8192 tokens)."}}',
    ],
)
async def test_every_servers_words_for_a_full_context_are_known(serve, message):
    server = await serve(message, 400)
    backend = SGLangBackend(server.url)
    with pytest.raises(ContextTooLong):
        await backend.generate(PROMPT, Sampling())
    await backend.close()


async def test_a_server_that_is_not_there_is_unavailable():
    backend = LlamaCppBackend("http://127.0.0.1:9")
    with pytest.raises(ModelUnavailable):
        await backend.generate(PROMPT, Sampling())
    await backend.close()


async def test_a_slow_server_is_unavailable(serve):
    async with StandIn() as server:
        server.policy = _never
        backend = VllmGenerateBackend(server.url, timeout_s=0.2)
        with pytest.raises(ModelUnavailable, match="no answer in time"):
            await backend.generate(PROMPT, Sampling())
        await backend.close()


async def _never(_: Any) -> str:
    import asyncio

    await asyncio.sleep(30)
    return ""


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("answer", ["<html>", [], {}, {"choices": [{}]}, {"tokens": [1]}])
async def test_nonsense_is_refused_not_crashed_on(serve, kind, answer):
    server = await serve(answer)
    backend = BACKENDS[kind](server.url)
    with pytest.raises(ModelRefused):
        await backend.generate(PROMPT, Sampling())
    await backend.close()


async def test_fewer_logprobs_than_tokens_are_refused_where_they_cannot_be_placed(serve):
    server = await serve(
        {"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.1]}, "finish_reason": "stop"}]}
    )
    backend = VllmBackend(server.url)
    with pytest.raises(ModelRefused, match="1 logprobs for 2 tokens"):
        await backend.generate(PROMPT, Sampling())
    await backend.close()


async def test_nothing_that_changes_the_distribution_is_left_to_the_servers_defaults(serve):
    server = await serve({})
    for backend in (VllmBackend(server.url), SGLangBackend(server.url), LlamaCppBackend(server.url)):
        with pytest.raises(ModelRefused):
            await backend.generate(PROMPT, Sampling(temperature=1.0, stop=("x",), extra_body={"min_p": 0.1}))
        await backend.close()
    bodies = [body for path, body in server.asked if path != "/v1/models"]
    flat = [body | body.get("sampling_params", {}) for body in bodies]
    for body in flat:
        assert (body["temperature"], body["top_p"], body["min_p"]) == (1.0, 1.0, 0.1)
        assert body["top_k"] in (-1, 0)
        assert body["stop"] == ["x"]
        assert (body["presence_penalty"], body["frequency_penalty"]) == (0.0, 0.0)
        assert 1.0 in (body.get("repetition_penalty"), body.get("repeat_penalty"))


async def test_a_seed_is_sent(serve):
    server = await serve({"enable_deterministic_inference": True})
    for backend in (VllmBackend(server.url), SGLangBackend(server.url), LlamaCppBackend(server.url)):
        with pytest.raises(ModelRefused):
            await backend.generate(PROMPT, Sampling(seed=5))
        await backend.close()
    bodies = [body | body.get("sampling_params", {}) for _, body in server.asked if body]
    assert [body.get("seed", body.get("sampling_seed")) for body in bodies] == [5, 5, 5]


async def test_probabilities_of_llamacpps_sampler_are_refused(serve):
    entry = {"id": 7, "prob": 0.5, "top_probs": []}
    server = await serve({"tokens": [7], "stop_type": "eos", "completion_probabilities": [entry]})
    backend = LlamaCppBackend(server.url)
    with pytest.raises(ModelRefused, match="post_sampling_probs"):
        await backend.generate(PROMPT, Sampling(extra_body={"post_sampling_probs": True}))
    await backend.close()


def scale_out_answer(weight_versions: Any) -> dict[str, Any]:
    """As vLLM 0.32 answers (entrypoints/scale_out/token_in_token_out/protocol.py)."""
    rows = [{"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []} for token in (7, 8, 9)]
    choice = {
        "index": 0,
        "token_ids": [7, 8, 9],
        "logprobs": {"content": rows},
        "finish_reason": "stop",
        "stop_reason": None,
        "weight_versions": weight_versions,
    }
    return {"request_id": "r", "choices": [choice], "prompt_logprobs": None}


EVEN = [math.log(1 / 8)] * 6
"""The likeliest six of eight tokens that are equally likely; the other two count as one."""
TOLD = -6 / 8 * math.log(1 / 8) - 2 / 8 * math.log(2 / 8)


def completions_answer(tops: list[dict[str, float] | None]) -> dict[str, Any]:
    """As vLLM answers at /v1/completions."""
    logprobs = {"token_logprobs": [-0.5] * len(tops), "top_logprobs": tops}
    choice = {"token_ids": [7] * len(tops), "logprobs": logprobs, "finish_reason": "stop"}
    return {"choices": [choice], "data": [{"id": "m"}]}


def llamacpp_answer(tops: list[list[float]]) -> dict[str, Any]:
    """As llama.cpp answers at /completion."""
    entries = [
        {"id": 7, "logprob": -0.5, "top_logprobs": [{"id": n, "logprob": p} for n, p in enumerate(top)]} for top in tops
    ]
    return {"tokens": [7] * len(tops), "completion_probabilities": entries, "stop_type": "eos", "model": "m"}


async def entropies_from(serve, backend_class, answer):
    server = await serve(answer)
    backend = backend_class(server.url)
    generation = await backend.generate(PROMPT, Sampling())
    await backend.close()
    return generation.entropies


async def test_entropies_are_those_of_the_likeliest_tokens_where_the_server_tells_them(serve):
    named = {f"t{n}": p for n, p in enumerate(EVEN)}
    for told in (
        await entropies_from(serve, VllmBackend, completions_answer([named, None])),
        await entropies_from(serve, LlamaCppBackend, llamacpp_answer([EVEN, EVEN[:1]])),
    ):
        assert told[0] == pytest.approx(TOLD)
        assert told[0] < math.log(8), "never more than the true one"
        assert told[1] is None


async def test_one_or_two_tokens_tell_no_entropy(serve):
    assert await entropies_from(serve, VllmBackend, completions_answer([{"a": -0.5, "b": -1.0}])) == []
    assert await entropies_from(serve, LlamaCppBackend, llamacpp_answer([[-0.5]])) == []
    assert await entropies_from(serve, VllmScaleOutBackend, scale_out_answer(None)) == []


async def test_weights_are_kept_for_each_range_of_tokens(serve):
    spans = [{"version": "step-3", "start": 0, "end": 2}, {"version": "step-4", "start": 2, "end": 3}]
    server = await serve(scale_out_answer(spans))
    backend = VllmScaleOutBackend(server.url)
    generation = await backend.generate(PROMPT, Sampling())
    assert generation.weights_spans == (WeightsSpan("step-3", 0, 2), WeightsSpan("step-4", 2, 3))
    assert generation.weights_version == "step-3"
    for none in (None, [{"version": None, "start": 0, "end": 3}]):
        server.answer = scale_out_answer(none)
        assert (await backend.generate(PROMPT, Sampling())).weights_version is None
    await backend.close()


@pytest.mark.parametrize(
    "spans",
    [
        ["3", "3", "4"],
        [{"version": "3"}],
        [{"version": "3", "start": 0, "end": 2}],
        [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 1, "end": 3}],
    ],
)
async def test_weights_that_are_not_those_of_the_tokens_are_refused(serve, spans):
    server = await serve(scale_out_answer(spans))
    backend = VllmScaleOutBackend(server.url)
    with pytest.raises(ModelRefused):
        await backend.generate(PROMPT, Sampling())
    await backend.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_the_model_can_be_asked_again(kind):
    ids = [1, 5, 9, 7, 2]
    async with StandIn() as server:
        backend = BACKENDS[kind](server.url)
        assert isinstance(backend, Scorer)
        scores = await backend.score(ids, [4, 1, 2])
        await backend.close()
    own = logprobs_of(ids)
    assert scores == pytest.approx([own[4], own[1], own[2]])


@pytest.mark.parametrize("kind", BACKENDS)
async def test_the_models_context_length_is_told(kind):
    async with StandIn(context_tokens=5000) as server:
        backend = BACKENDS[kind](server.url)
        assert await backend.context_tokens() == 5000
        await backend.close()


CARDS = [{"id": "base", "max_model_len": 40960}, {"id": "adapter", "parent": "base", "max_model_len": None}]


@pytest.mark.parametrize(
    ("kind", "answers", "model", "length"),
    [
        # vllm-project/vllm#4643 and sglang's http_server.py, `available_models`; an adapter has no length of its own
        ("vllm", {"/v1/models": {"data": CARDS}}, None, 40960),
        ("sglang", {"/v1/models": {"data": CARDS}}, "adapter", 40960),
        ("vllm", {"/v1/models": {"data": [*CARDS, {"id": "small", "max_model_len": 99}]}}, "small", 99),
        # llama.cpp's tools/server/README.md: the context of one slot
        ("llamacpp", {"/props": {"default_generation_settings": {"n_ctx": 8192}, "total_slots": 4}}, None, 8192),
        # servers of trainers, and gateways
        ("vllm-generate", {}, None, None),
        ("vllm", {"/v1/models": {"data": [{"id": "m"}]}}, None, None),
        ("sglang", {"/v1/models": []}, None, None),
    ],
)
async def test_the_context_length_is_read_where_each_server_tells_it(kind, answers, model, length):
    async def handle(request: web.Request) -> web.Response:
        if request.path in answers:
            return web.json_response(answers[request.path])
        return web.json_response({"error": "no"}, status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    backend = BACKENDS[kind](f"http://127.0.0.1:{runner.addresses[0][1]}", model=model)
    try:
        assert await backend.context_tokens() == length
    finally:
        await backend.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("path", "kind"), [("/props", LlamaCppBackend), ("/get_model_info", SGLangBackend), ("/version", VllmBackend)]
)
async def test_a_server_says_itself_what_it_is(path, kind):
    app = web.Application()
    app.router.add_get(path, _json_ok)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        backend = await connect(f"http://127.0.0.1:{runner.addresses[0][1]}")
        assert isinstance(backend, kind)
        await backend.close()
    finally:
        await runner.cleanup()


async def _json_ok(_: web.Request) -> web.Response:
    return web.json_response({})


async def test_an_unknown_server_is_refused(serve):
    server = await serve({"error": "no"}, 404)
    with pytest.raises(ModelRefused, match="name the backend"):
        await connect(server.url)


async def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="unknown backend 'tgi'"):
        await connect("http://127.0.0.1:9", "tgi")


# -- llama.cpp's missing probabilities -------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 4), max_size=12)


@given(TOKENS, st.data())
def test_an_aligned_logprob_is_always_the_tokens_own(tokens, data):
    """Whatever entries are missing: each logprob that is given belongs to that very position."""
    kept = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    places = [k for k, keep in enumerate(kept) if keep]
    aligned = align([tokens[k] for k in places], [float(-k) for k in places], tokens)
    assert len(aligned) == len(tokens)
    for place, logprob in enumerate(aligned):
        assert logprob is None or logprob == -place


@given(TOKENS)
def test_nothing_missing_means_nothing_lost(tokens):
    logprobs = [-0.1 * k for k in range(len(tokens))]
    assert align(tokens, logprobs, tokens) == logprobs


def test_a_missing_last_entry_leaves_only_the_last_token_without():
    assert align([5, 6], [-0.5, -0.6], [5, 6, 7]) == [-0.5, -0.6, None]


def test_where_the_missing_one_stood_is_not_guessed():
    assert align([5, 6], [-0.5, -0.6], [5, 6, 6]) == [-0.5, None, None]


@given(TOKENS, TOKENS)
def test_probabilities_of_other_tokens_are_refused(tokens, other):
    assume(any(t not in tokens for t in other))
    with pytest.raises(ModelRefused):
        align(other, [0.0] * len(other), tokens)
