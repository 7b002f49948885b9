"""The server in front of llama.cpp merges without changing a token, pauses, and changes weights under load."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest

from agent_loop.local_models.cpu_model import UpdatableModel
from agent_loop.local_models.cpu_model.shared_reading import Merger, common_prefix
from agent_loop.model.backends.llamacpp import LlamaCppBackend
from agent_loop.model.contract import Sampling
from support.pool_wait import eventually
from support.tiny_llama import write_tiny_llama
from support.tokens_cpu import require_cpu_model

PROMPT = [72, 101, 108, 111, 45]
OTHER = [72, 99]
SHARED = list(range(40, 90))


def sampling(seed: int, group: int = 0, tokens: int = 6) -> Sampling:
    extra = {"hermes_group": group, "hermes_group_id": f"g{seed // 100}"} if group else {}
    return Sampling(temperature=1.0, max_tokens=tokens, seed=seed, extra_body=extra)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model of bytes: quick, and its numbers are as real as any."""
    require_cpu_model()
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@asynccontextmanager
async def model_with(**options):
    require_cpu_model()
    async with UpdatableModel(threads=1, parallel=4, context_tokens=256, **options) as front:
        backend = LlamaCppBackend(front.url)
        try:
            yield front, backend
        finally:
            await backend.close()


async def post(front: UpdatableModel, path: str, body: dict | None = None) -> tuple[int, dict]:
    async with aiohttp.ClientSession() as session, session.post(front.url + path, json=body or {}) as response:
        return response.status, await response.json()


async def check_merging(front: UpdatableModel, backend: LlamaCppBackend, prompt: list[int], other: list[int]) -> None:
    """Alone or merged, first or last: the same tokens with the same logprobs."""
    alone = [await backend.generate(prompt, sampling(100 + n, group=1)) for n in range(3)]
    await asyncio.gather(*(backend.generate(other, sampling(700 + n, group=2)) for n in range(2)))
    before = front.stats()["train"]["sent"]
    order = (2, 0, 1)
    merged = await asyncio.gather(*(backend.generate(prompt, sampling(100 + n, group=3)) for n in order))
    assert front.stats()["train"]["sent"] == before + 1
    for n, one in enumerate(alone):
        assert merged[order.index(n)].token_ids == one.token_ids
        assert merged[order.index(n)].logprobs == one.logprobs


async def test_a_merged_group_gets_the_tokens_that_each_request_would_get_alone_whatever_came_before():
    async with model_with(weights="Q8_0") as (front, backend):
        prompt, other = [*SHARED, *PROMPT], [*SHARED, *OTHER]
        await check_merging(front, backend, prompt, other)
        await front.share_prefix(SHARED)
        read = front.stats()["train"]["read_tokens"]
        await check_merging(front, backend, prompt, other)
        assert front.stats()["train"]["read_tokens"] - read == 4 * len(PROMPT) + len(OTHER)


async def test_the_shared_prefix_is_read_again_with_new_weights_and_other_prompts_are_read_whole(tiny):
    async with model_with(model=tiny) as (front, backend):
        whole = await backend.generate([*SHARED, *PROMPT], sampling(100, group=1))
        await front.share_prefix(SHARED)
        await front.update_weights(None, "1")
        again = await backend.generate([*SHARED, *PROMPT], sampling(100, group=1))
        assert (again.token_ids, again.weights_version) == (whole.token_ids, "1")
        read = front.stats()["train"]["read_tokens"]
        await backend.generate(PROMPT, sampling(100, group=1))
        assert front.stats()["train"]["read_tokens"] - read == len(PROMPT)


async def test_a_pause_holds_training_requests_but_not_evaluation_until_the_new_weights_are_there(tiny):
    opened_with = []

    async def before_open(version: str) -> None:
        held_back = asyncio.create_task(backend.generate(PROMPT, sampling(5)))
        evaluation = LlamaCppBackend(front.url + "/eval")
        opened_with.append((version, (await evaluation.generate(PROMPT, sampling(5))).weights_version))
        await evaluation.close()
        assert not held_back.done()
        later.append(held_back)

    later: list[asyncio.Task] = []
    async with model_with(model=tiny, before_open=before_open) as (front, backend):
        assert (await backend.generate(PROMPT, sampling(1))).weights_version == "0"
        assert (await post(front, "/control/pause"))[0] == 200
        waiting = [asyncio.create_task(backend.generate(PROMPT, sampling(200 + n, group=2))) for n in range(2)]
        status, answer = await post(front, "/control/weights", {"adapter": None, "version": "7"})
        assert (status, answer["version"]) == (200, "7")
        assert opened_with == [("7", "7")]
        done = await asyncio.gather(*waiting, *later)
        assert {generation.weights_version for generation in done} == {"7"}


async def test_new_weights_wait_for_requests_under_way_and_lose_none(tiny):
    async with model_with(model=tiny) as (front, backend):
        flying = [asyncio.create_task(backend.generate(PROMPT, sampling(n, tokens=24))) for n in range(3)]
        await eventually(lambda: front.stats()["train"]["requests"] == 3)
        await front.update_weights(None, "1")
        versions = [(await task).weights_version for task in flying]
        assert versions[0] == "0"
        assert set(versions) <= {"0", "1"}
        assert (await backend.generate(PROMPT, sampling(9))).weights_version == "1"


async def test_what_is_wrong_is_said_and_the_old_weights_go_on(tiny):
    async with model_with(model=tiny) as (front, backend):
        status, answer = await post(front, "/control/weights", {"adapter": "/no/such.gguf", "version": "1"})
        assert status == 400
        assert "/no/such.gguf" in answer["error"]["message"]
        assert (await post(front, "/control/weights", {"adapter": None}))[0] == 400
        status, answer = await post(front, "/completion", {"prompt": [10**8], "n_predict": 1})
        assert status >= 400
        assert answer["error"]
        assert (await backend.generate(PROMPT, sampling(1))).weights_version == "0"


async def test_a_group_that_lost_a_member_goes_on_without_it_and_only_following_seeds_are_joined():
    sent = []

    async def send(body):
        sent.append((body.get("seed"), body.get("n_cmpl", 1)))
        first, count = body["seed"], body.get("n_cmpl", 1)
        if count == 1:
            return {"index": 0, "got": first}
        return [{"index": n, "got": first + n} for n in reversed(range(count))]

    async def may_go() -> None:
        return None

    merger = Merger(widest=2, wait_s=0.01)
    seeds = (12, 10, 11, 30)
    bodies = [{"prompt": [1], "seed": seed, "hermes_group": 5} for seed in seeds]
    answers = await asyncio.gather(*(merger.ask(body, send, may_go) for body in bodies))
    assert [answer["got"] for answer in answers] == list(seeds)
    assert sorted(sent) == [(10, 2), (12, 1), (30, 1)]


async def test_a_server_that_refuses_is_heard_by_every_member():
    async def send(_body):
        raise ValueError("no")

    async def may_go() -> None:
        return None

    merger = Merger(widest=8, wait_s=5.0)
    bodies = [{"prompt": [1], "seed": seed, "hermes_group": 2} for seed in (1, 2)]
    answers = await asyncio.gather(*(merger.ask(b, send, may_go) for b in bodies), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["no", "no"]
    with pytest.raises(KeyError):
        await merger.ask({"prompt": [1]}, send, may_go)


def test_the_shared_prefix_is_what_all_prompts_begin_with():
    assert common_prefix([[1, 2, 3, 4], [1, 2, 5], [1, 2, 3]]) == [1, 2]
    assert common_prefix([[1, 2], [1, 2, 3]]) == [1, 2]
    assert common_prefix([[1, 2], [1, 2]]) == []
