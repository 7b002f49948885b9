"""Servers as the config names them: with tokens where the server gives them, without where it does not."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from agent_loop.local_models.standin import StandIn
from agent_loop.model.contract import ModelTurn, Sampling
from environments.config.settings import ServerConfig
from environments.errors import ConfigError
from environments.models import ModelOpener, load_tokenizer
from support.env_tasks import right

TASK = [{"role": "user", "content": "Write 5 into answer.txt"}]
TOOLS = [{"type": "function", "function": {"name": "terminal", "parameters": {"type": "object", "properties": {}}}}]


async def ask(*servers: ServerConfig, environ: dict[str, str] | None = None) -> tuple[ModelTurn, int]:
    async with AsyncExitStack() as stack:
        model = await ModelOpener(stack, "hermes", "standin", environ=environ).open(servers)
        conversation = model.open(TASK, TOOLS)
        turn = await conversation.sample(Sampling(max_tokens=200))
        return turn, len(conversation.segments())


@pytest.mark.parametrize("kind", ["auto", "vllm", "vllm-scale-out", "vllm-generate", "sglang", "llamacpp", "openai"])
async def test_every_kind_of_server_plays(kind: str) -> None:
    async with StandIn(right) as standin:
        base = f"{standin.url}/v1" if kind == "openai" else standin.url
        turn, segments = await ask(ServerConfig(base_url=base, server_type=kind, model_name="standin"))  # type: ignore[arg-type]
    assert [call.name for call in turn.calls] == ["terminal"]
    assert segments == (0 if kind == "openai" else 1)


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_a_server_on_this_machine_is_not_asked_through_a_proxy(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with StandIn(right) as standin:
        turn, _ = await ask(ServerConfig(base_url=f"{standin.url}/v1", server_type=kind, model_name="m"))  # type: ignore[arg-type]
    assert turn.calls


async def test_the_shortest_context_of_the_servers_is_known() -> None:
    async with AsyncExitStack() as stack:
        sizes = (9000, 7000)
        servers = [await stack.enter_async_context(StandIn(right, context_tokens=size)) for size in sizes]
        opener = ModelOpener(stack, "hermes", "standin")
        await opener.open([ServerConfig(base_url=s.url, server_type="vllm") for s in servers])
        assert opener.context_tokens == 7000


async def test_a_server_that_is_still_starting_may_be_opened_when_its_model_is_named() -> None:
    server = ServerConfig(base_url="http://127.0.0.1:9", server_type="vllm", model_name="m")
    async with AsyncExitStack() as stack:
        opener = ModelOpener(stack, "hermes", "standin")
        await opener.open([server])
        assert opener.context_tokens is None


async def test_the_standin_starts_by_itself() -> None:
    turn, segments = await ask(ServerConfig(server_type="standin", options={"policy": "looping"}))
    assert turn.calls[0].raw_arguments == {"command": "ls"}
    assert segments == 1


@pytest.mark.parametrize("policy", [right, "support.env_tasks:right"])
async def test_the_standin_plays_a_policy_of_ones_own(policy: Any) -> None:
    turn, _ = await ask(ServerConfig(server_type="standin", options={"policy": policy}))
    assert [call.name for call in turn.calls] == ["terminal"]


async def test_options_alone_mean_the_standin_and_a_server_needs_its_address() -> None:
    turn, _ = await ask(ServerConfig(options={"policy": "looping"}))
    assert turn.calls[0].raw_arguments == {"command": "ls"}
    with pytest.raises(ConfigError, match=r"openai\.base_url is missing"):
        await ask(ServerConfig(model_name="m"))


async def test_a_policy_that_cannot_be_imported_is_a_mistake_of_the_settings() -> None:
    with pytest.raises(ConfigError, match="wrogn' cannot be imported"):
        await ask(ServerConfig(server_type="standin", options={"policy": "support.env_tasks:wrogn"}))


async def test_rollouts_stay_on_one_of_several_servers() -> None:
    async with StandIn(right) as one, StandIn(right) as two, AsyncExitStack() as stack:
        servers = [ServerConfig(base_url=s.url, server_type="vllm", model_name="m") for s in (one, two)]
        model = await ModelOpener(stack, "hermes", "standin").open(servers)
        for _ in range(4):
            conversation = model.open(TASK, TOOLS)
            for _ in range(2):
                await conversation.sample(Sampling(max_tokens=100))
                conversation.append([{"role": "user", "content": "again"}])
        assert (len(one.log), len(two.log)) == (4, 4)
        assert model.count_tokens(TASK, ())


async def test_keys_come_from_the_named_variable_and_a_missing_one_is_an_error() -> None:
    server = ServerConfig(base_url="http://127.0.0.1:9", server_type="vllm", api_key_env="MY_KEY")
    with pytest.raises(ConfigError, match="MY_KEY, which is not set"):
        await ask(server, environ={})


async def test_a_server_that_is_not_there_or_is_something_else_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"no model server: http://127\.0\.0\.1:9/props: .*correct openai\.base_url"):
        await ask(ServerConfig(base_url="http://127.0.0.1:9"))
    async with StandIn(right) as standin:
        with pytest.raises(ConfigError, match=r"cannot be used: .* answers neither as"):
            await ask(ServerConfig(base_url=f"{standin.url}/elsewhere"))
        with pytest.raises(ConfigError, match=r"no tokenizer '/no/such' \(openai\.tokenizer_name"):
            await ask(ServerConfig(base_url=standin.url, tokenizer_name="/no/such"))


@pytest.mark.parametrize("url", ["localhost:8000", "ws://x", "http://"])
def test_an_address_is_checked_when_it_is_read(url: str) -> None:
    with pytest.raises(ValueError, match="is not an address like http://127"):
        ServerConfig(base_url=url)


def test_a_key_never_shows_in_a_config() -> None:
    server = ServerConfig(api_key="sk-hush")  # type: ignore[arg-type]
    assert "sk-hush" not in repr(server)
    assert "sk-hush" not in server.model_dump_json()


def test_the_standins_tokenizer_has_a_name() -> None:
    assert load_tokenizer("standin").eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (None, "it is not on this machine, and the hub does not answer"),
        (404, "is not a valid model identifier"),
    ],
)
async def test_a_tokenizer_that_cannot_be_had_is_one_sentence_at_once(
    status: int | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def answer(request: web.BaseRequest) -> web.Response:
        asked.append(request.path)
        if status is None:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=status or 500, headers={"X-Error-Code": "RepoNotFound"})

    async with RawTestServer(answer) as hub:
        address = str(hub.make_url("")).rstrip("/")
        files = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        with pytest.raises(ConfigError, match=f"no tokenizer 'no/such' .*{says}"):
            await asyncio.to_thread(load_tokenizer, "no/such")
    # Where nothing answers, no file is asked for: transformers would ask again and again.
    assert any("resolve" in path for path in asked) == (status is not None)
