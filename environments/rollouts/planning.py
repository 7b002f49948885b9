"""What a rollout is told: a `RolloutJob`, which follows from the config, the item and a few numbers alone."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import orjson

from agent_loop.context.result_budget import ResultBudget
from agent_loop.context.window import ContextPolicy
from agent_loop.limits import Limits
from agent_loop.local_models.standin.solver import checked_steps
from agent_loop.model.backends.backend import GROUP, GROUP_ID, ITEM
from agent_loop.model.contract import Message, Sampling
from agent_loop.tools import DISTRIBUTIONS, TOOLSETS, SandboxTools, ToolConfig, draw, resolve
from agent_loop.tools.config import McpServerConfig
from agent_loop.tools.policy import AskCallback
from agent_loop.tools.sandbox_tools import chosen_tools
from agent_loop.tools.tool import Tool, ToolsetError
from environments.config.settings import HermesAgentEnvConfig, Verification
from environments.errors import ConfigError
from environments.sandboxes import Sandbox
from environments.scoring.contexts import RolloutScope, SandboxContext
from sandbox_pool.server.serving.wire import PROTOCOL
from sandbox_pool.spec import SandboxSpec

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv
    from environments.roles import RolloutRoles
    from environments.rollouts.hack_meter import Tripwire

UserReply = Callable[[Any, Sequence[Message], SandboxContext], Awaitable[str | None]]
"""`user_reply(item, messages, ctx)` of an environment."""
DEFAULT_TOOLSETS = ("terminal", "file")
TURN_SHARE = 4
"""Without `max_tokens_per_turn` a turn may sample this part of `max_token_length`."""
UNTOLD_CONTEXT = 32_768
"""Tokens of the longest sequence when neither the config nor the server tells."""
MOST_UNASKED = 131_072
"""A model may take a million tokens, but trainers seldom do, and a group of such rows is gigabytes: ask for them."""

KNOWN_SOLUTIONS = 4096
"""Items whose solutions the stand-in remembers: those of the groups that run, and some before."""


@dataclass(frozen=True)
class ToolChoice:
    """Toolsets of a rollout, and single tools of them that it does not get. No toolsets: no tools, and no slot."""

    toolsets: tuple[str, ...]
    without: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """The tools; ToolsetError when all of the chosen ones were taken away."""
        return resolve(self.toolsets, self.without) if self.toolsets else ()


@dataclass(frozen=True)
class RolloutJob:
    """Everything one rollout is told. The rollouts of a group differ in id, seed and prepared state only."""

    rollout_id: str
    group_id: str
    environment: str
    policy: str
    item: Any
    item_id: str
    category: str
    messages: list[Message]
    tools: ToolChoice
    tool_config: ToolConfig
    sampling: Sampling
    limits: Limits
    context: ContextPolicy
    budget: ResultBudget
    spec: SandboxSpec
    lease_ttl_s: float
    """A slot held longer than this is taken back by the pool."""
    verifier_paths: Sequence[str]
    verification: Verification
    store_end_state: bool = False
    """Keep the texts of the workspace in the record."""
    ask: AskCallback | None = None
    always_allowed: set[str] | None = None
    """Rules that `ask` answered with "always", shared by all rollouts of the run."""
    activity: Callable[[str, str], None] | None = None
    """Told the rollout's id and what it does."""
    own_tools: tuple[Tool, ...] = ()
    """What the environment's `tools` gave for the item."""
    mcp: Mapping[str, McpServerConfig] = field(default_factory=dict)
    roles: Callable[[int | None], RolloutRoles] | None = None
    """Makes the judge and the user of a rollout with this seed; None without either."""
    user: UserReply | None = None
    """The environment's `user_reply`, when somebody answers the agent."""
    scope: RolloutScope = field(default_factory=RolloutScope)
    """Of this rollout alone; see `for_rollout`."""
    snapshot: str | None = None
    """Prepared state of the group, when the environment prepares one."""
    prepared_network: Sequence[dict[str, Any]] = ()
    """Hosts asked for while it was prepared."""
    wire: Tripwire | None = None
    """Planted in the slot before the agent comes, and looked at afterwards."""

    def for_rollout(self, rollout_id: str, sampling: Sampling) -> RolloutJob:
        """The group's job as one rollout's, with a state and roles of its own."""
        scope = RolloutScope(self.item, {}, self.roles(sampling.seed) if self.roles else None)
        return replace(self, rollout_id=rollout_id, sampling=sampling, scope=scope)

    @property
    def needs_slot(self) -> bool:
        """Whether the agent can do anything but talk."""
        return bool(self.tools.toolsets or self.own_tools or self.mcp)

    def on_activity(self, what: str) -> None:
        if self.activity is not None:
            self.activity(self.rollout_id, what)

    def runtime(self, sandbox: Sandbox) -> SandboxTools:
        """The tools of this rollout on a sandbox."""
        return SandboxTools(
            sandbox,
            self.tools.toolsets,
            self.tool_config,
            without=self.tools.without,
            ask=self.ask,
            always_allowed=self.always_allowed,
            on_activity=self.on_activity,
            own=self.own_tools,
            mcp=self.mcp,
            own_context=SandboxContext(sandbox, scope=self.scope) if self.own_tools else None,
        )


def plan_group(
    env: HermesAgentBaseEnv, item: Any, group_id: str, index: int, temperature: float | None = None
) -> RolloutJob:
    """What the rollouts of one group share; each gets a copy with its own `rollout_id` and seed."""
    config = env.config
    spec = env.spec(item)
    tools, own_tools = choose_tools(config, index), tuple(env.tools(item))
    try:
        chosen_tools(tools.toolsets, tools.without, own_tools, more_to_come=True)
    except ToolsetError as error:  # it would be the same in every group
        raise ConfigError(str(error)) from error
    if spec.workdir is not None and not PurePosixPath(spec.workdir).parts[1:]:
        raise ConfigError(f"sandbox.workdir is {spec.workdir!r}: name a folder below /, which is what is verified")
    timeout_s = max(1, round(config.terminal_timeout))
    longest = env.longest_sequence()
    item_id, messages = env.item_id(item), first_messages(config, env.format_prompt(item))
    extra_body = _extra_body(config, group_id)
    if env.plays_solutions:
        extra_body[ITEM] = _told(env, item, item_id, messages)
    return RolloutJob(
        rollout_id=group_id,
        group_id=group_id,
        environment=env.name or type(env).__name__,
        policy=env.policy_name,
        item=item,
        item_id=item_id,
        category=env.category(item),
        messages=messages,
        tools=tools,
        tool_config=config.tools.model_copy(update={"default_timeout_s": timeout_s}),
        sampling=Sampling(
            temperature=config.agent_temperature if temperature is None else temperature,
            max_tokens=turn_tokens(config, longest),
            extra_body=extra_body,
        ),
        limits=env.limits(item).model_copy(update={"max_turns": config.max_agent_turns}),
        context=ContextPolicy(max_tokens=prompt_tokens(config, longest)),
        budget=ResultBudget(
            per_result_chars=config.default_result_size_chars,
            per_turn_chars=config.turn_budget_chars,
            preview_chars=config.preview_size_chars,
            overrides=config.tool_result_overrides,
        ),
        spec=spec,
        lease_ttl_s=config.terminal_lifetime,
        verifier_paths=env.verifier_paths,
        verification=config.verification,
        store_end_state=config.store_end_state,
        ask=env.allow_command,
        always_allowed=env.always_allowed,
        activity=env.activity,
        own_tools=own_tools,
        mcp=config.mcp,
        roles=env.roles,
        user=env.user_reply if env.has_user else None,
    )


def _told(env: HermesAgentBaseEnv, item: Any, item_id: str, messages: Sequence[Message]) -> dict[str, Any]:
    """Let a stand-in know which item it is about to be asked about, and what solves it."""
    known = env.known_solutions
    try:
        known[item_id] = checked_steps(env.solution(item))
    except ValueError as error:
        raise ConfigError(f"item {item_id}: `solution`: {error}") from None
    while len(known) > KNOWN_SOLUTIONS:
        known.pop(next(iter(known)))
    return {"id": item_id, "said": sum(message.get("role") == "assistant" for message in messages)}


def choose_tools(config: HermesAgentEnvConfig, group: int) -> ToolChoice:
    """Tools of one group: the same for all its rollouts, drawn by the run's seed and the group's number."""
    if config.distribution is not None:
        available = [name for name in TOOLSETS if name != "web" or config.tools.web is not None]
        chosen: Sequence[str] = draw(
            config.distribution,
            f"{config.seed}:{group}",
            available=available,
            distributions={**DISTRIBUTIONS, **config.distributions},
        )
    else:
        chosen = DEFAULT_TOOLSETS if config.enabled_toolsets is None else config.enabled_toolsets
    # A name that is both a toolset and a tool (terminal) means the toolset.
    choice = ToolChoice(tuple(chosen), resolve(config.disabled_toolsets) if config.disabled_toolsets else ())
    choice.names()
    return choice


def check_mcp(config: HermesAgentEnvConfig) -> None:
    """ConfigError for MCP servers that cannot start on this machine."""
    if config.mcp and importlib.util.find_spec("mcp") is None:
        raise ConfigError("env.mcp needs the package mcp: pip install 'hermes-rl[mcp]'")
    for name, server in config.mcp.items():
        if not re.fullmatch(r"\w+", name, re.ASCII):
            raise ConfigError(f"env.mcp: {name!r} is not a name of letters, digits and _, which its tools begin with")
        if server.command and server.where == "host" and shutil.which(server.command[0]) is None:
            raise ConfigError(f"env.mcp.{name}.command: there is no program {server.command[0]!r} on this machine")


def longest_sequence(
    config: HermesAgentEnvConfig, trainer_max_tokens: int = -1, model_context: int | None = None
) -> int:
    """Tokens a sequence may have: ours, or what the trainer takes (exclusive; -1: no limit) when that is less.

    One less than the model's context: SGLang refuses a prompt and a turn that would fill it exactly.
    """
    told = model_context - 1 if model_context else UNTOLD_CONTEXT
    ours = config.max_token_length or max(1, min(told, MOST_UNASKED))
    return min(ours, trainer_max_tokens - 1) if trainer_max_tokens > 0 else ours


def turn_tokens(config: HermesAgentEnvConfig, longest: int) -> int:
    """Tokens one turn may sample."""
    return config.max_tokens_per_turn or max(1, longest // TURN_SHARE)


def prompt_tokens(config: HermesAgentEnvConfig, longest: int) -> int:
    """Tokens a prompt may have. It leaves room for one turn, so no sequence outgrows the limit."""
    room = max(1, longest - turn_tokens(config, longest))
    return min(config.max_context_tokens or room, room)


def _extra_body(config: HermesAgentEnvConfig, group_id: str) -> dict[str, Any]:
    """A server that is to merge the requests of a group is told which group it is."""
    extra = dict(config.extra_body or {})
    return {**extra, GROUP_ID: group_id} if GROUP in extra else extra


def seed_of(config: HermesAgentEnvConfig, name: str) -> int:
    """A seed that follows from the run's seed and a name alone."""
    digest = hashlib.sha256(f"{config.seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def first_messages(config: HermesAgentEnvConfig, prompt: str | Sequence[Message]) -> list[Message]:
    """The conversation a rollout starts with."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if config.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def item_field(item: Any, name: str) -> Any:
    """A field of an item, which may be a mapping or an object; None when it has no such field."""
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)


def content_id(item: Any) -> str:
    """A stable name for an item that has no id of its own: a hash of what it is."""
    return hashlib.sha256(orjson.dumps(item, default=str, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def prepared_key(env: HermesAgentBaseEnv, item: Any, spec: SandboxSpec) -> str:
    """Equal when `prepare` would give the same: the same slot, the same source files, the same item."""
    own = [one for one in type(env).mro() if "prepare" in vars(one) or "files" in vars(one)]
    code = [_source_of(one) for one in own]
    files = {path: data if isinstance(data, bytes) else data.encode() for path, data in env.files(item).items()}
    place = [env.config.pool.provider, env.config.pool.provider_options, os.geteuid()]
    parts = [PROTOCOL, spec.key(), place, code, env.prepare_key(item), sorted(files.items())]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _source_of(one: type) -> bytes:
    """The file that defines a class: any change in it makes what the class prepared earlier stale."""
    try:
        return hashlib.sha256(Path(inspect.getfile(one)).read_bytes()).digest()
    except (OSError, TypeError):
        raise ConfigError(f"env.prepare_cache_mb needs the source of {one.__name__}, which is in no file") from None
