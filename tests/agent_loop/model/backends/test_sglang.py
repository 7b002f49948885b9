"""SGLang: only the model's logprobs are stored, and requests are what its own published types describe."""

from __future__ import annotations

import ast
import logging
import math
import zipfile
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from agent_loop.model.backends import SGLangBackend, connect
from agent_loop.model.backends.sglang import CHANGES_LOGPROBS, NEUTRAL, TOP_LEVEL
from agent_loop.model.contract import ModelRefused, Sampling, WeightsSpan
from support.real_tokenizers import TOOLS, download

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
VOCABULARY = 5


class Sampler:
    """Answers as SGLang 0.5.23 does (layers/sampler.py): logprobs after temperature, or before it when told so."""

    def __init__(self) -> None:
        self.original = False
        self.flat = False
        self.info: dict[str, Any] = {"enable_deterministic_inference": False}
        self.spans: list[dict[str, Any]] | None = None
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.url = ""

    def logprobs(self, ids: list[int], temperature: float) -> list[float]:
        """Of every token after these ids."""
        logits = [0.0 if self.flat else math.sin(7.0 * token + sum(ids)) for token in range(VOCABULARY)]
        if self.flat:
            logits[0] = 30.0
        scaled = [value / temperature for value in logits]
        total = math.log(sum(math.exp(value) for value in scaled))
        return [value - total for value in scaled]

    async def handle(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        if request.path in ("/model_info", "/server_info"):
            return web.json_response(self.info)
        if request.path != "/generate":
            raise web.HTTPNotFound
        body = await request.json()
        self.asked.append(body)
        temperature = body["sampling_params"]["temperature"] or 1.0
        own = self.logprobs(body["input_ids"], 1.0)
        token = own.index(max(own))
        shown = own if self.original else self.logprobs(body["input_ids"], temperature)
        meta = {
            "finish_reason": {"type": "length", "length": 1},
            "output_token_logprobs": [[shown[token], token, None]],
            "weight_version": "default",
        }
        if self.spans is not None:
            meta["weight_versions"] = self.spans
        return web.json_response({"text": "", "output_ids": [token], "meta_info": meta})


@pytest.fixture
async def sampler() -> AsyncIterator[Sampler]:
    served = Sampler()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", served.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield served
    await runner.cleanup()


@pytest.fixture
async def backend(sampler: Sampler) -> AsyncIterator[SGLangBackend]:
    made = SGLangBackend(sampler.url)
    yield made
    await made.close()


@pytest.mark.parametrize("temperature", [0.5, 2.0])
async def test_the_samplers_logprobs_are_refused_at_other_temperatures(backend, temperature):
    with pytest.raises(ModelRefused, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
        await backend.generate(PROMPT, Sampling(temperature=temperature))


async def test_a_temperature_in_the_extra_body_counts_too(backend):
    with pytest.raises(ModelRefused, match=r"at temperature 0\.5"):
        await backend.generate(PROMPT, Sampling(extra_body={"temperature": 0.5}))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
async def test_a_server_that_gives_the_models_logprobs_is_measured_once_and_used(sampler, backend, temperature):
    sampler.original = True
    generation = await backend.generate(PROMPT, Sampling(temperature=temperature))
    assert generation.logprobs == [max(sampler.logprobs(PROMPT, 1.0))]
    asked = len(sampler.asked)
    await backend.generate(PROMPT, Sampling(temperature=temperature))
    assert len(sampler.asked) == asked + 1


async def test_a_prompt_that_cannot_tell_the_two_apart_is_refused_and_the_next_one_is_asked(sampler, backend):
    sampler.original = sampler.flat = True
    with pytest.raises(ModelRefused):
        await backend.generate(PROMPT, Sampling(temperature=0.5))
    sampler.flat = False
    assert (await backend.generate(PROMPT, Sampling(temperature=0.5))).token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_at_temperatures_0_and_1_nothing_is_asked_beforehand(sampler, backend, temperature):
    generation = await backend.generate(PROMPT, Sampling(temperature=temperature))
    assert generation.logprobs == [max(sampler.logprobs(PROMPT, 1.0))]
    assert len(sampler.asked) == 1


@pytest.mark.parametrize("extra", [{"repetition_penalty": 1.1}, {"logit_bias": {"5": 1.0}}, {"regex": "a+"}])
async def test_what_sglang_works_into_its_logprobs_is_refused(backend, extra):
    with pytest.raises(ModelRefused, match=next(iter(extra))):
        await backend.generate(PROMPT, Sampling(extra_body=extra))
    assert (await backend.generate(PROMPT, Sampling(extra_body={"repetition_penalty": 1.0}))).token_ids


async def test_fields_of_the_request_are_not_taken_for_sampling_params(sampler, backend):
    await backend.generate(PROMPT, Sampling(extra_body={"lora_path": "step-7", "min_p": 0.1}))
    (body,) = sampler.asked
    assert body["lora_path"] == "step-7"
    assert "lora_path" not in body["sampling_params"]
    assert body["sampling_params"]["min_p"] == 0.1


async def test_a_seed_that_would_be_ignored_is_left_out_and_said_once(sampler, backend, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await backend.generate(PROMPT, Sampling(seed=7))
    assert all("sampling_seed" not in body["sampling_params"] for body in sampler.asked)
    assert [r for r in caplog.messages if "--enable-deterministic-inference" in r] == caplog.messages[:1]


async def test_weights_are_kept_for_each_range_of_tokens(sampler, backend):
    assert (await backend.generate(PROMPT, Sampling())).weights_version == "default"
    sampler.spans = [{"version": "step-3", "start": 0, "end": 1}]
    generation = await backend.generate(PROMPT, Sampling())
    assert (generation.weights_version, generation.weights_spans) == ("step-3", (WeightsSpan("step-3", 0, 1),))


async def test_it_is_known_by_model_info_without_the_deprecated_address(sampler):
    found = await connect(sampler.url)
    await found.close()
    assert isinstance(found, SGLangBackend)
    assert sampler.paths == ["/props", "/model_info"]


def published_fields(path: str, name: str) -> set[str]:
    """The fields of a class in SGLang's wheel, without importing it: it would want torch."""
    wheel = download("sglang==0.5.23", TOOLS / "downloads")
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read(path))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


@pytest.mark.timeout(300)
async def test_every_field_that_is_sent_is_in_sglangs_published_types(sampler, backend):
    request = published_fields("sglang/srt/managers/io_struct.py", "GenerateReqInput")
    params = published_fields("sglang/srt/sampling/sampling_params.py", "SamplingParams")
    sampler.info = {"enable_deterministic_inference": True}
    everything = Sampling(max_tokens=5, top_p=0.9, seed=3, stop=("x",))
    await backend.generate(PROMPT, everything, stop_ids=[2])
    with pytest.raises(ModelRefused):
        await backend.score(PROMPT, [1])
    for body in sampler.asked:
        assert set(body) <= request
        assert set(body["sampling_params"]) <= params
    assert {"sampling_seed", "stop_token_ids", "stop"} <= set(sampler.asked[0]["sampling_params"])
    assert request >= TOP_LEVEL
    assert params >= set(NEUTRAL)
    assert request | params >= CHANGES_LOGPROBS
    assert not (TOP_LEVEL & params) - {"watermark"}
