"""Opens the configured inference servers as one `ModelServer`; everything opened is owned by the given exit stack.

Servers that speak token ids get a recorder, so rollouts carry exact training data. A plain chat endpoint gives rollouts
without tokens, and they say so. With several servers each rollout stays on one, so that its prefix stays in that
server's cache.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import logging
import os
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

from agent_loop.local_models.standin import Policy, StandIn, chatml_tokenizer, named_policy
from agent_loop.local_models.standin.chatml import chatml_template
from agent_loop.local_models.standin.solver import SOLVERS, Step, solver
from agent_loop.model.backends import TokenBackend, VllmBackend, connect
from agent_loop.model.backends.backend import Generation
from agent_loop.model.backends.http import http_address, is_loopback
from agent_loop.model.chat import ChatServer
from agent_loop.model.contract import (
    Conversation,
    Message,
    ModelRefused,
    ModelServer,
    ModelUnavailable,
    Sampling,
    ToolSchema,
)
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from environments.atropos.compat import usable_api_key
from environments.config.settings import ServerConfig
from environments.errors import ConfigError
from sandbox_pool.errors import did_you_mean
from tool_parsers import get_parser

log = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
OURS = frozenset({"keep_log"})
"""Arguments of servers started here that no config sets."""
PLAYED_BY_DEFAULT = {"env.judge": "judge", "env.user": "user"}
"""What a stand-in plays in each section that is not the policy's."""
NUMBERS: Mapping[str, Any] = {"int": int, "float": int | float}


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
        solutions: Mapping[str, Sequence[Step]] | None = None,
        environ: Mapping[str, str] | None = None,
        section: str = "openai",
        replayed: bool = False,
    ) -> None:
        """`section` names the settings in messages. With `replayed` a tape answers, and no server is started or asked.

        `solutions` (item or prompt -> steps, read at each request) are what the stand-in plays as `solver` or
        `oracle`."""
        self._stack = stack
        self._parser = get_parser(parser)
        self._tokenizer_name = tokenizer_name
        self._tools_in_prompt = tools_in_prompt
        self._solutions = {} if solutions is None else solutions
        self._environ = os.environ if environ is None else environ
        self._section = section
        self._replayed = replayed
        self.plays_solutions = False
        """Whether a stand-in was opened that does."""
        self.context_tokens: int | None = None
        """The shortest context of the opened servers, as far as they tell it."""

    async def open(self, servers: Sequence[ServerConfig]) -> ModelServer:
        """All of them as one."""
        opened = [await self._open_one(server) for server in servers]
        return opened[0] if len(opened) == 1 else Balanced(opened)

    async def _open_one(self, server: ServerConfig) -> ModelServer:
        if self._replayed:
            return await self._tape_player(server)
        if not server.base_url and server.server_type not in ("standin", "cpu-model"):
            raise ConfigError(f"{self._section}.base_url is missing: where is the model server?")
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
            backend = await connect(
                server.base_url,
                server.server_type,
                model=None if server.model_name == "default" else server.model_name,
                api_key=self._key(server),
                timeout_s=server.timeout_s,
                ca_file=server.ca_file,
            )
            tokenizer = await asyncio.to_thread(load_tokenizer, server.tokenizer_name or self._tokenizer_name)
            return await self.record(backend, tokenizer)
        except ModelUnavailable as error:
            raise ConfigError(f"no model server: {error}: start it, or correct {self._section}.base_url") from error
        except ModelRefused as error:
            raise ConfigError(f"the model server cannot be used: {error}") from error

    async def record(self, backend: TokenBackend, tokenizer: Any) -> ModelServer:
        """A recorder over a token backend; raises TemplateRefused when the chat template cannot be exact."""
        self._stack.push_async_callback(backend.close)
        try:
            told = await backend.context_tokens()
        except ModelUnavailable as error:  # a server that is still starting will be there for the first rollout
            log.warning("the model's context length is not known: %s", error)
            told = None
        if told is not None:
            self.context_tokens = min(told, self.context_tokens or told)
        template = await asyncio.to_thread(probe_template, tokenizer)
        return Recorder(backend, template, self._parser, write_tools=self._tools_in_prompt)

    async def _chat(self, server: ServerConfig) -> ModelServer:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        here = bool(server.base_url) and is_loopback(str(http_address(server.base_url, may_have_query=True).hostname))
        client = AsyncOpenAI(
            base_url=server.base_url or None,
            api_key=usable_api_key(self._key(server)),
            timeout=server.timeout_s,
            max_retries=0,
            # A proxy could not reach this machine.
            http_client=DefaultAsyncHttpxClient(
                trust_env=not here,
                verify=ssl.create_default_context(cafile=server.ca_file) if server.ca_file else True,
            ),
        )
        self._stack.push_async_callback(client.close)
        return ChatServer(client, server.model_name, self._parser)

    async def _standin(self, server: ServerConfig) -> ModelServer:
        options = checked_options(StandIn, server.options, self._section)
        policy = self._policy(options.pop("policy", self._played_by_default()))
        standin = await self._stack.enter_async_context(StandIn(policy, keep_log=False, **options))
        return await self.record(VllmBackend(standin.url, model="standin"), chatml_tokenizer())

    def _played_by_default(self) -> str:
        return PLAYED_BY_DEFAULT.get(self._section, "solver")

    async def _tape_player(self, server: ServerConfig) -> ModelServer:
        """What reads a server's answers, without the server: every request must be on the tape of a rollout."""
        if server.server_type == "standin":  # it was told the item, so the tape says so
            self.plays_solutions |= server.options.get("policy", self._played_by_default()) in SOLVERS
        if server.server_type == "openai":
            return ChatServer(_NoServer(), server.model_name, self._parser)
        template = await asyncio.to_thread(lambda: probe_template(self._tokenizer_of(server)))
        return Recorder(_NoServer(), template, self._parser, write_tools=self._tools_in_prompt)

    def _tokenizer_of(self, server: ServerConfig) -> Any:
        if server.server_type == "cpu-model":
            from agent_loop.local_models.cpu_model import CpuModel

            return CpuModel(**checked_options(CpuModel, server.options, self._section)).tokenizer
        standin = server.server_type == "standin"
        return load_tokenizer("standin" if standin else server.tokenizer_name or self._tokenizer_name)

    def _policy(self, wanted: Any) -> Policy:
        """A scripted policy: a function, `module:function`, or one of ours by name."""
        if callable(wanted):
            return cast("Policy", wanted)
        name = str(wanted)
        if name in SOLVERS:
            self.plays_solutions = True
            return solver(self._solutions, SOLVERS[name])
        module_name, _, function = name.partition(":")
        try:
            if not function:
                return named_policy(name)
            return cast("Policy", getattr(importlib.import_module(module_name), function))
        except ValueError as error:
            raise ConfigError(f"{self._section}.options.policy: {error}, or give module:function") from error
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self._section}.options.policy {name!r} cannot be imported: {error}") from error

    async def _cpu_model(self, server: ServerConfig) -> ModelServer:
        from agent_loop.local_models.cpu_model import CpuModel

        try:
            model = await self._stack.enter_async_context(
                CpuModel(**checked_options(CpuModel, server.options, self._section))
            )
        except ValueError as error:
            raise ConfigError(f"{self._section}.options: {error}") from error
        return await self.record(model.backend(), model.tokenizer)

    def _key(self, server: ServerConfig) -> str | None:
        if server.api_key is not None:
            return server.api_key.get_secret_value()
        if server.api_key_env is None:
            return None
        if server.api_key_env not in self._environ:
            raise ConfigError(f"{self._section}.api_key_env names {server.api_key_env}, which is not set")
        return self._environ[server.api_key_env]


class _NoServer:
    """Stands where a replay has no server; being asked is a mistake of ours."""

    async def chat_completion(self, **options: Any) -> Any:
        raise RuntimeError("a replay has no model server")

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        raise RuntimeError("a replay has no model server")

    async def context_tokens(self) -> int | None:
        return None

    async def close(self) -> None: ...


def checked_options(kind: type, given: Mapping[str, Any], section: str = "openai") -> dict[str, Any]:
    """`options` of a section as arguments of a server started here; ConfigError for an unknown name or bad value."""
    known = {name: str(of.annotation) for name, of in inspect.signature(kind).parameters.items() if name not in OURS}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{section}.options: unknown key {name!r}; {did_you_mean(name, known)}")
        wanted = NUMBERS.get(known[name].removesuffix(" | None"), object)
        if value is not None and (not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not object)):
            raise ConfigError(f"{section}.options.{name} is a number, not {value!r}")
    return dict(given)


@asynccontextmanager
async def open_model(
    server: ServerConfig | None = None, *, tokenizer_name: str = "", parser: str = "hermes"
) -> AsyncIterator[ModelServer]:
    """A model for a `HermesAgentLoop`, with exact tokens where its server gives them; by default a stand-in."""
    async with AsyncExitStack() as stack:
        opener = ModelOpener(stack, parser, tokenizer_name)
        yield await opener.open([server or ServerConfig(server_type="standin")])


def load_tokenizer(name: str) -> Any:
    """A tokenizer by its Hugging Face name or directory, or out of a GGUF file; `standin` ships here. Blocking."""
    if name == "standin":
        return chatml_tokenizer()
    if name.endswith(".gguf"):
        from agent_loop.local_models.cpu_model.gguf import transformers_tokenizer

        return transformers_tokenizer(Path(name), chatml_template())
    from transformers import AutoTokenizer

    offline = not Path(name).is_dir() and not _hub_answers(name)
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=offline)
    except (OSError, ValueError) as error:
        reason = "it is not on this machine, and the hub does not answer" if offline else str(error).partition("\n")[0]
        raise ConfigError(f"no tokenizer {name!r} (openai.tokenizer_name or env.tokenizer_name): {reason}") from error


def _hub_answers(name: str) -> bool:
    """Ask once: transformers asks twelve times, with pauses, before it gives up (47 s)."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError:  # an answer, and what it says about the name, transformers says in words
        return True
    except Exception:  # noqa: BLE001 - each version has its own kinds for "no connection", "no time" and "offline"
        return False
    return True
