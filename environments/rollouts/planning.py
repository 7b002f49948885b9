"""What each rollout of a group is told: messages, tools, sampling, limits; a function of config and numbers alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from agent_loop.context.window import ContextPolicy
from agent_loop.model.backends.backend import GROUP, GROUP_ID
from agent_loop.model.contract import Message, Sampling
from agent_loop.tools import TOOLSETS, draw, resolve
from environments.config.settings import HermesAgentEnvConfig
from environments.rollouts.rollout import RolloutSettings, ToolChoice

DEFAULT_TOOLSETS = ("terminal", "file")
TURN_SHARE = 4
"""Without `max_tokens_per_turn` a turn may sample this part of `max_token_length`."""
UNTOLD_CONTEXT = 32_768
"""Tokens of the longest sequence when neither the config nor the server tells."""
MOST_UNASKED = 131_072
"""A model may take a million tokens, but trainers seldom do, and a group of such rows is gigabytes: ask for them."""


@dataclass(frozen=True)
class Plan:
    """Derives the settings of rollouts from an environment's config."""

    config: HermesAgentEnvConfig
    trainer_max_tokens: int = -1
    """The trainer's limit on a sequence, exclusive; -1 when there is none."""
    model_context: int | None = None
    """The model's context length, where its server tells it."""

    def tools(self, group: int) -> ToolChoice:
        """Tools of one group: the same for all its rollouts, drawn by the run's seed and the group's number."""
        config = self.config
        if config.distribution is not None:
            available = [name for name in TOOLSETS if name != "web" or config.tools.web is not None]
            chosen: Sequence[str] = draw(config.distribution, f"{config.seed}:{group}", available=available)
        else:
            chosen = config.enabled_toolsets or DEFAULT_TOOLSETS
        choice = ToolChoice(tuple(chosen), _single_tools(config.disabled_toolsets or ()))
        choice.names()
        return choice

    def longest_sequence(self) -> int:
        """Tokens a sequence may have: ours, or what the trainer takes when that is less.

        One less than the model's context: SGLang refuses a prompt and a turn that would fill it exactly.
        """
        told = self.model_context - 1 if self.model_context else UNTOLD_CONTEXT
        ours = self.config.max_token_length or max(1, min(told, MOST_UNASKED))
        return min(ours, self.trainer_max_tokens - 1) if self.trainer_max_tokens > 0 else ours

    def turn_tokens(self) -> int:
        """Tokens one turn may sample."""
        return self.config.max_tokens_per_turn or max(1, self.longest_sequence() // TURN_SHARE)

    def sampling(self, temperature: float, seed: int | None, group_id: str = "") -> Sampling:
        """How a rollout samples. A server that is to merge the requests of a group is told which group it is."""
        extra = dict(self.config.extra_body or {})
        if GROUP in extra:
            extra[GROUP_ID] = group_id
        return Sampling(temperature=temperature, max_tokens=self.turn_tokens(), seed=seed, extra_body=extra)

    def settings(self, environment: str, policy: str) -> RolloutSettings:
        """What all rollouts share. Prompts leave room for one turn, so no sequence outgrows the limit."""
        config = self.config
        room = max(1, self.longest_sequence() - self.turn_tokens())
        return RolloutSettings(
            environment=environment,
            policy=policy,
            limits=config.limits.build(config.max_agent_turns),
            context=ContextPolicy(max_tokens=min(config.max_context_tokens or room, room)),
            budget=config.build_budget_config(),
            tools=config.tools.model_copy(update={"default_timeout_s": max(1, round(config.terminal_timeout))}),
            lease_ttl_s=config.terminal_lifetime,
            whole_layer=config.verification == "layer",
        )

    def seed(self, name: str) -> int:
        """A seed that follows from the run's seed and a name alone."""
        digest = hashlib.sha256(f"{self.config.seed}:{name}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    def messages(self, prompt: str | Sequence[Message]) -> list[Message]:
        """The conversation a rollout starts with."""
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.config.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.config.system_prompt})
        return messages


def _single_tools(names: Sequence[str]) -> tuple[str, ...]:
    """What `disabled_toolsets` takes away. A name that is a toolset and a tool (terminal) means the toolset."""
    return resolve(names) if names else ()


def item_field(item: Any, name: str) -> Any:
    """A field of an item, which may be a mapping or an object; None when it has none."""
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)


def content_id(item: Any) -> str:
    """A stable name for an item that has no id of its own: a hash of what it is."""
    return hashlib.sha256(orjson.dumps(item, default=str, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
