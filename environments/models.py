"""Opens the configured inference servers as one `ModelServer`; everything opened is owned by the given exit stack.

Servers that speak token ids get a recorder, so rollouts carry exact training data. A plain chat endpoint gives rollouts
without tokens, and they say so. With several servers each rollout stays on one, so that its prefix stays in that
server's cache.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agent_loop.local_models.standin import StandIn, chatml_tokenizer, named_policy
from agent_loop.local_models.standin.chatml import chatml_template
from agent_loop.local_models.standin.solver import solver
from agent_loop.model.backends import TokenBackend, connect
from agent_loop.model.backends.vllm import VllmBackend, VllmGenerateBackend, VllmScaleOutBackend
from agent_loop.model.chat import ChatServer
from agent_loop.model.contract import Conversation, Message, ModelRefused, ModelServer, ModelUnavailable, ToolSchema
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from environments.atropos.compat import usable_api_key
from environments.config.settings import ServerConfig
from environments.errors import ConfigError
from tool_parsers import get_parser

NAMED_MODEL: dict[str, Callable[..., TokenBackend]] = {
    "vllm": VllmBackend,
    "vllm-scale-out": VllmScaleOutBackend,
    "vllm-generate": VllmGenerateBackend,
}


class Balanced:
    """Several servers as one: each conversation goes to the next in turn and stays there."""

    def __init__(self, servers: Sequence[ModelServer]) -> None:
        self._servers = list(servers)
        self._next = itertools.cycle(self._servers)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Conversation:
        """Start a conversation on the next server."""
        return next(self._next).open(messages, tools)

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int | None:
        """As the first server counts; they serve the same model."""
        return self._servers[0].count_tokens(messages, tools)


class ModelOpener:
    """Opens servers for an environment."""

    def __init__(
        self,
        stack: AsyncExitStack,
        parser: str,
        tokenizer_name: str,
        *,
        tools_in_prompt: bool = True,
        solutions: Mapping[str, Sequence[str]] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`solutions` (prompt -> shell commands, read at each request) are what the `solver` stand-in plays."""
        self._stack = stack
        self._parser = get_parser(parser)
        self._tokenizer_name = tokenizer_name
        self._tools_in_prompt = tools_in_prompt
        self._solutions = {} if solutions is None else solutions
        self._environ = os.environ if environ is None else environ

    async def open(self, servers: Sequence[ServerConfig]) -> ModelServer:
        """All of them as one."""
        opened = [await self._open_one(server) for server in servers]
        return opened[0] if len(opened) == 1 else Balanced(opened)

    async def _open_one(self, server: ServerConfig) -> ModelServer:
        match server.server_type:
            case "openai":
                return await self._chat(server)
            case "standin":
                return await self._standin(server)
            case "cpu-model":
                return await self._cpu_model(server)
            case _:
                return await self._token_server(server)

    async def _token_server(self, server: ServerConfig) -> ModelServer:
        try:
            backend = await self._backend(server)
            tokenizer = await asyncio.to_thread(load_tokenizer, server.tokenizer_name or self._tokenizer_name)
            return await self.record(backend, tokenizer)
        except ModelUnavailable as error:
            raise ConfigError(f"no model server: {error}: start it, or correct openai.base_url") from error
        except ModelRefused as error:
            raise ConfigError(f"the model server cannot be used: {error}") from error

    async def record(self, backend: TokenBackend, tokenizer: Any) -> ModelServer:
        """A recorder over a token backend; raises TemplateRefused when the chat template cannot be exact."""
        self._stack.push_async_callback(backend.close)
        template = await asyncio.to_thread(probe_template, tokenizer)
        return Recorder(backend, template, self._parser, write_tools=self._tools_in_prompt)

    async def _chat(self, server: ServerConfig) -> ModelServer:
        from openai import AsyncOpenAI

        key = usable_api_key(self._key(server))
        client = AsyncOpenAI(base_url=server.base_url or None, api_key=key, timeout=server.timeout_s, max_retries=0)
        self._stack.push_async_callback(client.close)
        return ChatServer(client, server.model_name, self._parser)

    async def _standin(self, server: ServerConfig) -> ModelServer:
        options = dict(server.options)
        name = str(options.pop("policy", "solver"))
        policy = solver(self._solutions) if name == "solver" else named_policy(name)
        standin = await self._stack.enter_async_context(StandIn(policy, keep_log=False, **options))
        return await self.record(VllmBackend(standin.url, model="standin"), chatml_tokenizer())

    async def _cpu_model(self, server: ServerConfig) -> ModelServer:
        from agent_loop.local_models.cpu_model import CpuModel

        model = await self._stack.enter_async_context(CpuModel(**server.options))
        return await self.record(model.backend(), model.tokenizer)

    async def _backend(self, server: ServerConfig) -> TokenBackend:
        key = self._key(server)
        if server.server_type in NAMED_MODEL and server.model_name != "default":
            kind = NAMED_MODEL[server.server_type]
            return kind(server.base_url, model=server.model_name, api_key=key, timeout_s=server.timeout_s)
        return await connect(server.base_url, server.server_type, api_key=key, timeout_s=server.timeout_s)

    def _key(self, server: ServerConfig) -> str | None:
        if server.api_key is not None:
            return server.api_key.get_secret_value()
        if server.api_key_env is None:
            return None
        if server.api_key_env not in self._environ:
            raise ConfigError(f"openai.api_key_env names {server.api_key_env}, which is not set")
        return self._environ[server.api_key_env]


def load_tokenizer(name: str) -> Any:
    """A tokenizer by its Hugging Face name or directory, or out of a GGUF file; `standin` ships here. Blocking."""
    if name == "standin":
        return chatml_tokenizer()
    if name.endswith(".gguf"):
        from agent_loop.local_models.cpu_model.gguf import transformers_tokenizer

        return transformers_tokenizer(Path(name), chatml_template())
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"no tokenizer {name!r} (openai.tokenizer_name or env.tokenizer_name): {reason}") from error
