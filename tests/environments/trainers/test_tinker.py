"""Tinker's sampling client and data, with a stand-in for the package: the real one is in tests/live/tinker."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from agent_loop.local_models.standin import chatml_tokenizer
from agent_loop.model.backends.vllm import VllmBackend
from agent_loop.model.contract import ModelRefused, ModelUnavailable, Sampling
from environments.rollouts.rollouts import Rollouts
from environments.trainers.tinker import TinkerBackend, tinker_datum
from support.env_pool import DirectoryPool
from support.env_tasks import NumberEnv, sometimes_right, standin_model

ITEM = {"id": "x", "number": 7}


class TinkerError(Exception):
    """As Tinker names it."""


class APIStatusError(TinkerError):
    """As Tinker names it."""


class RateLimitError(APIStatusError):
    """As Tinker names it."""


@dataclass
class Params:
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[int] | None = None


@dataclass
class Client:
    """Tinker's call; our stand-in samples."""

    backend: VllmBackend
    raises: Exception | None = None
    asked: list[Params] = field(default_factory=list)

    async def sample_async(self, prompt: list[int], num_samples: int, sampling_params: Params) -> Any:
        if self.raises is not None:
            raise self.raises
        self.asked.append(sampling_params)
        sampling = Sampling(max_tokens=sampling_params.max_tokens, seed=sampling_params.seed)
        made = await self.backend.generate(prompt, sampling, stop_ids=sampling_params.stop or ())
        sequence = SimpleNamespace(tokens=made.token_ids, logprobs=made.logprobs, stop_reason=made.finish_reason)
        return SimpleNamespace(sequences=[sequence])


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    types = SimpleNamespace(
        ModelInput=SimpleNamespace(from_ints=list),
        SamplingParams=Params,
        Datum=lambda model_input, loss_fn_inputs: SimpleNamespace(ids=model_input, inputs=loss_fn_inputs),
    )
    errors = {"TinkerError": TinkerError, "APIStatusError": APIStatusError, "RateLimitError": RateLimitError}
    errors |= {"ConflictError": RateLimitError, "InternalServerError": RateLimitError}
    monkeypatch.setitem(sys.modules, "tinker", SimpleNamespace(types=types, **errors))


async def test_samples_become_data_shifted_by_one() -> None:
    pool = DirectoryPool()
    async with standin_model(sometimes_right) as (_, standin):
        client = Client(VllmBackend(standin.url, model="standin"))
        backend = TinkerBackend(client, version="0")
        env = NumberEnv(pool, max_tokens_per_turn=300)
        async with Rollouts(env, model=backend, tokenizer=chatml_tokenizer()) as rollouts:
            samples = await rollouts.group(ITEM, 4)
            backend.use(client, version="1")
            [later] = await rollouts.member(ITEM, "g")
        await client.backend.close()
    pool.close()
    assert {sample.reward for sample in samples} == {0.0, 1.0}
    assert [set(samples[0].weights), set(later.weights)] == [{"0"}, {"1"}]
    assert {asked.max_tokens for asked in client.asked} == {300}
    for sample in samples:
        datum = tinker_datum(sample)
        assert datum.ids == sample.tokens[:-1]
        assert datum.inputs["target_tokens"].tolist() == sample.tokens[1:]
        assert datum.inputs["logprobs"].tolist() == pytest.approx(sample.logprobs[1:])
        wanted = [(sample.advantage or 0.0) * mask for mask in sample.mask[1:]]
        assert datum.inputs["advantages"].tolist() == pytest.approx(wanted)
    per_turn = replace(samples[0], token_advantages=[2.0] * len(samples[0].tokens))
    assert set(tinker_datum(per_turn).inputs["advantages"].tolist()) == {0.0, 2.0}
    with pytest.raises(ValueError, match="no advantage"):
        tinker_datum(later)


@pytest.mark.parametrize(
    ("raised", "becomes"), [(RateLimitError(), ModelUnavailable), (APIStatusError("no such model"), ModelRefused)]
)
async def test_errors_are_those_of_the_loop(raised: Exception, becomes: type[Exception]) -> None:
    backend = TinkerBackend(Client(None, raises=raised))  # type: ignore[arg-type]
    with pytest.raises(becomes):
        await backend.generate([1], Sampling(max_tokens=1))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(max_tokens=1, stop=("x",))])
async def test_what_tinker_cannot_do_is_refused(sampling: Sampling) -> None:
    with pytest.raises(ModelRefused, match="set"):
        await TinkerBackend(None).generate([1], sampling)
