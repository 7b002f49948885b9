"""Trainers that sample themselves and ask for one rollout at a time: slime, SkyRL, NeMo Gym, and rows for all of them.

slime is not on PyPI: the stand-in below has the fields and calls of its published source. NeMo Gym itself is in
tests/live/nemo_gym; SkyRL's own types are in tests/live/skyrl, verl's in tests/live/verl.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from agent_loop.local_models.standin import PolicyRequest, StandIn, chatml_tokenizer
from agent_loop.local_models.standin.policies import call
from agent_loop.model.backends.vllm import VllmBackend
from agent_loop.model.contract import Sampling
from environments.errors import ConfigError, RolloutLost
from environments.rollouts.blocking import BlockingRollouts
from environments.rollouts.rollouts import Rollouts
from environments.trainers.item_rows import nemo_gym_rows, skyrl_rows, slime_rows, verl_rows
from environments.trainers.one_by_one import close_all, opened
from environments.trainers.servers.nemo_gym import nemo_gym_app
from environments.trainers.slime import generate
from support.env_tasks import NumbersFromConfig, sometimes_right

CONFIG = "environment: support.env_tasks:NumbersFromConfig\nopenai: {server_type: standin}\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "numbers.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
async def standin() -> AsyncIterator[StandIn]:
    async with StandIn(sometimes_right) as server:
        yield server
        await close_all()
    while NumbersFromConfig.pools:
        pool = NumbersFromConfig.pools.pop()
        assert pool.live == {}
        pool.close()


@dataclass
class SlimeSample:
    """The fields of slime's Sample that a generate function fills."""

    metadata: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[str] = field(default_factory=list)

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"

    status: Status = Status.PENDING


def slime_args(standin: StandIn, config: str, *settings: str) -> SimpleNamespace:
    host, port = standin.url.removeprefix("http://").split(":")
    own = {"hf_checkpoint": "standin", "hermes_environment": config, "hermes_settings": list(settings)}
    return SimpleNamespace(sglang_router_ip=host, sglang_router_port=int(port), **own)


def row(config: str, rows: Any = slime_rows) -> dict[str, Any]:
    """The first row; made in a thread, because it needs an event loop of its own."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        [found] = thread.submit(rows, config, 1).result()
    return found


async def test_slimes_sample_holds_what_its_router_sampled(standin: StandIn, config: str) -> None:
    item = row(config)["metadata"]
    args = slime_args(standin, config)
    samples = await asyncio.gather(*(generate(args, SlimeSample(dict(item)), {"temperature": 1.0}) for _ in range(4)))
    assert {sample.reward for sample in samples} == {0.0, 1.0}
    sampled = [(entry.prompt_ids, entry.sampled_ids, entry.logprobs) for entry in standin.log]
    for sample in samples:
        assert sample.status is SlimeSample.Status.COMPLETED
        assert len(sample.loss_mask or ()) == len(sample.rollout_log_probs or ()) == sample.response_length
        begins = len(sample.tokens) - sample.response_length
        turns = [turn for turn in sampled if sample.tokens[: len(turn[0])] == turn[0]]
        whole = next(turn for turn in turns if turn[0] + turn[1] == sample.tokens)
        end = sample.response_length
        assert (sample.rollout_log_probs or [])[end - len(whole[1]) :] == pytest.approx(whole[2])
        trained = sum(sample.loss_mask or ())
        assert len(whole[1]) < trained < sample.response_length
        assert begins == min(len(turn[0]) for turn in turns)


def long_winded(request: PolicyRequest) -> str:
    return "Done." if request.results >= 5 else call("terminal", {"command": "seq 300"})


async def test_segments_of_a_truncated_rollout_are_samples_of_their_own(standin: StandIn, config: str) -> None:
    short = ["--env.max_token_length", "2400", "--env.max_tokens_per_turn", "100", "--env.max_agent_turns", "8"]
    short += ["--env.enabled_toolsets", '["terminal"]', "--env.disabled_toolsets", '["process"]']
    async with StandIn(long_winded, split_share=0.0) as talker:
        args = slime_args(talker, config, *short)
        made = await generate(args, SlimeSample(dict(row(config)["metadata"])), {"temperature": 1.0})
        await close_all()
        sampled = sum(len(entry.sampled_ids) for entry in talker.log)
    assert len(made) > 1
    assert sum(sum(sample.loss_mask) for sample in made) == sampled
    assert len({sample.metadata["rollout_id"] for sample in made}) == 1
    assert len({id(sample.metadata) for sample in made}) == len(made)


async def test_one_sequence_trainers_refuse_several(standin: StandIn, config: str) -> None:
    with pytest.raises(ConfigError, match=r"set env\.segments to last, or to forbid"):
        await opened(config, [], chatml_tokenizer())
    first = await opened(config, ["--env.segments", "last"], chatml_tokenizer(), most_tokens=900)
    assert await opened(config, ["--env.segments", "last"], chatml_tokenizer()) is first
    assert first._rollouts.env.config.max_token_length == 900


async def test_a_rollout_that_is_lost_raises(standin: StandIn, config: str) -> None:
    args = slime_args(standin, config, "--env.rollout_tries", "1")
    sample = SlimeSample(dict(row(config)["metadata"]))
    assert (await generate(args, sample, {})).reward is not None
    args.sglang_router_port = 9  # nobody listens there
    with pytest.raises(RolloutLost):
        await generate(args, SlimeSample(dict(row(config)["metadata"])), {})


async def test_skyrls_batch_is_in_order_and_names_its_steps(
    standin: StandIn, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ModuleType("skyrl.train.generators.base")
    vars(base).update(GeneratorInterface=object, GeneratorInput=dict, GeneratorOutput=dict)
    for name in ("skyrl", "skyrl.train", "skyrl.train.generators"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "environments.trainers.skyrl", raising=False)
    from environments.trainers.skyrl import SkyrlGenerator

    class Client:
        backend = VllmBackend(standin.url, model="standin")

        async def generate(self, batch: dict[str, Any]) -> dict[str, Any]:
            params = batch["sampling_params"]
            [prompt], sampling = batch["prompt_token_ids"], Sampling(max_tokens=params["max_tokens"])
            made = await self.backend.generate(prompt, sampling, stop_ids=params["stop_token_ids"])
            ids, logprobs = [made.token_ids], [made.logprobs]
            return {"response_ids": ids, "stop_reasons": [made.finish_reason], "response_logprobs": logprobs}

    generator = SkyrlGenerator(config, chatml_tokenizer(), Client(), step_wise=True)
    extras = [{"item": row(config, skyrl_rows)["item"]}] * 4
    batch = {"env_extras": extras, "sampling_params": {"temperature": 1.0}, "trajectory_ids": list("abcd")}
    made = await generator.generate(batch)
    await Client.backend.close()
    assert made["trajectory_ids"] == list("abcd")
    assert made["is_last_step"] == [True] * 4
    assert set(made["rewards"]) == {0.0, 1.0}
    for prompt, response, mask, logprobs in zip(
        *(made[key] for key in ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")), strict=True
    ):
        assert prompt
        assert len(response) == len(mask) == len(logprobs)
        assert mask[0] == 1
        assert 0 < sum(mask) < len(mask)


def test_nemo_gyms_run_is_a_finished_response_with_exact_tokens(config: str) -> None:
    item = nemo_gym_rows(config, 1)[0]
    with BlockingRollouts(Rollouts(config, ["--openai.options.policy", "support.env_tasks:right"])) as rollouts:
        transport = httpx.ASGITransport(nemo_gym_app(rollouts))

        async def ask(body: Any) -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://gym", timeout=60) as client:
                return await client.post("/run", json=body)

        told = asyncio.run(ask(item)).json()
        refused = asyncio.run(ask({"item": "nonsense"}))
    while NumbersFromConfig.pools:
        NumbersFromConfig.pools.pop().close()
    assert (refused.status_code, "nemo_gym_rows" in refused.text) == (422, True)
    assert (told["reward"], told["agent_ref"]) == (1.0, item["agent_ref"])
    response = Response.model_validate(told["response"])
    assert [own.type for own in response.output] == ["function_call", "function_call_output", "message"]
    sampled = [own for own in told["response"]["output"] if "generation_token_ids" in own]
    assert [own["type"] for own in sampled] == ["function_call", "message"]
    first, last = sampled
    assert last["prompt_token_ids"][: len(first["prompt_token_ids"])] == first["prompt_token_ids"]
    for own in sampled:
        assert len(own["generation_token_ids"]) == len(own["generation_log_probs"])


def test_rows_carry_prompt_and_item(config: str) -> None:
    assert [json.loads(own["extra_info"]["item"])["number"] for own in verl_rows(config, 3)] == [0, 1, 2]
    assert verl_rows(config, 1)[0]["prompt"] == skyrl_rows(config, 1)[0]["prompt"]
    assert slime_rows(config, 1)[0]["prompt"][-1]["content"] == "Write 0 into answer.txt"
    while NumbersFromConfig.pools:
        NumbersFromConfig.pools.pop().close()


def test_what_infrastructure_ended_is_a_failure_for_nemo_gym_and_no_reward(config: str) -> None:
    item = nemo_gym_rows(config, 1)[0]
    with BlockingRollouts(Rollouts(config, ["--openai.options.policy", "support.env_tasks:right"])) as rollouts:
        ran = rollouts.rollouts.run_member

        async def lost(*given: Any) -> Any:
            raise RolloutLost("the sandbox is gone", [(await ran(*given)).record])

        app = nemo_gym_app(rollouts)

        async def ask(path: str, body: Any) -> Any:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://gym", timeout=60
            ) as client:
                return (await client.post(path, json=body)).json()

        fine = asyncio.run(ask("/run", item))
        rollouts.rollouts.run_member = lost  # type: ignore[method-assign]
        failed = asyncio.run(ask("/run", item))
        told = asyncio.run(ask("/aggregate_metrics", {"verify_responses": [fine, failed]}))
    while NumbersFromConfig.pools:
        NumbersFromConfig.pools.pop().close()
    assert "_ng_failure_class" not in fine
    assert failed["_ng_failure_class"]
    assert failed["failure_reason"].startswith("the sandbox is gone: 1 lost")
    assert told["key_metrics"] == {"rollouts": 1, "lost": 1, "mean/reward": 1.0}
