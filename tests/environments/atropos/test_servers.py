"""atroposlib's own server classes as a token backend, on the stand-in that speaks their protocols."""

from __future__ import annotations

from typing import Any

import pytest
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager

from agent_loop.local_models.standin import Fault, PolicyRequest, StandIn, chatml_tokenizer
from agent_loop.model.contract import ModelRefused, ModelUnavailable, Sampling
from environments.atropos.servers import AtroposServerBackend
from support.env_tasks import right


@pytest.fixture(autouse=True)
def local_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """atroposlib loads the tokenizer of the model from the hub; here it gets the stand-in's."""
    for module in ("vllm_server", "sglang_server"):
        name = f"atroposlib.envs.server_handling.{module}.AutoTokenizer.from_pretrained"
        monkeypatch.setattr(name, lambda *_, **__: chatml_tokenizer())


def backend(url: str, kind: str = "vllm", servers: int = 1) -> AtroposServerBackend:
    config = APIServerConfig(
        base_url=f"{url}/v1", model_name="standin", api_key="x", server_type=kind, health_check=False
    )
    return AtroposServerBackend(ServerManager([config] * servers))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_ids_and_logprobs_are_those_the_server_sampled(kind: str) -> None:
    ids = chatml_tokenizer().encode("<|im_start|>user\nWrite 5 into answer.txt<|im_end|>\n<|im_start|>assistant\n")
    async with StandIn(right) as standin:
        generation = await backend(standin.url, kind).generate(ids, Sampling(max_tokens=100, seed=3))
        [exchange] = standin.log
    assert exchange.prompt_ids == ids
    assert generation.token_ids == exchange.sampled_ids
    assert generation.logprobs == pytest.approx(exchange.logprobs)
    assert generation.finish_reason == "stop"


async def test_one_request_is_one_request_whatever_the_answer() -> None:
    """atroposlib alone would ask three times where the server said no, and nine through chat."""
    for status, expected in ((400, ModelRefused), (503, ModelUnavailable), (429, ModelUnavailable)):

        def refuse(request: PolicyRequest, status: int = status) -> str:
            raise Fault(status)

        async with StandIn(refuse) as standin:
            with pytest.raises(expected):
                await backend(standin.url).generate([1, 2], Sampling(max_tokens=5))
            assert len(standin.log) == 1


async def test_a_server_that_is_down_is_unavailable_at_once() -> None:
    with pytest.raises(ModelUnavailable):
        await backend("http://127.0.0.1:9").generate([1], Sampling(max_tokens=5))


class Stub:
    """Stands for one server of a manager with a given answer."""

    class config:
        base_url, model_name, server_type = "http://x", "m", "vllm"

    check_task = None

    def __init__(self, answer: Any) -> None:
        import asyncio

        self.answer, self.sem = answer, asyncio.Semaphore(4)
        self.servers = [self]

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (([2], [[5]], [[-0.1]], ["stop"]), ModelRefused, "changed the prompt ids"),
        (([1, 2], [[5, 6]], [[-0.1]], ["stop"]), ModelRefused, "another number of logprobs"),
        (([1, 2], [], [], []), ModelRefused, "no tokens"),
        (([1, 2], [[5]], [[-0.1]], ["abort"]), ModelUnavailable, "gave up"),
        (([1, 2], [[5]], [[-0.1]], [None]), ModelUnavailable, "gave up"),
    ],
)
async def test_answers_that_would_not_be_exact_are_errors(answer: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        await AtroposServerBackend(Stub(answer)).generate([1, 2], Sampling())
