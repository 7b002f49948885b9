"""Which commands may run, for users whose slots are not isolated. Off where the slot itself isolates them.

Rules are tried in order; the first whose pattern is found in the text decides, else `default`. The text is a terminal
command, the code of a script, or input typed into a process. Regular expressions over shell text are a guard against
accidents, not a defence against an attacker: for that, use an isolated slot.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, field_validator

from agent_loop.tools.output import strip_ansi
from agent_loop.tools.tool import work_out

Action = Literal["allow", "deny", "ask"]
Answer = Literal["once", "session", "always", "deny"]
"""`session`: also whatever else the same rule asks about in this rollout; `always`: in every rollout of this run."""
AskCallback = Callable[[str, str, str], Awaitable[Answer | bool]]
"""Given the tool's name, the text, and what the rule has against it, says whether it may run. True is `once`."""

ISOLATED_LEVELS = ("namespaces", "landlock")
"""Isolation levels at which a command cannot hurt the host."""


class Rule(BaseModel):
    """One rule: what to do with commands in which the pattern is found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pattern: str
    """Regular expression, searched in the whole text."""
    action: Action
    reason: str = ""
    tools: tuple[str, ...] = ()
    """Tools it applies to; empty is all."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern


@lru_cache(maxsize=8)
def rule_set(name: str) -> tuple[Rule, ...]:
    """A set of rules that ships: a file of the folder `rules`. Its rules ask, and ignore case."""
    found = files("agent_loop.tools").joinpath("rules", f"{name}.yaml")
    rows = yaml.safe_load(found.read_text("utf-8"))
    return tuple(Rule(pattern=f"(?i){row['pattern']}", action="ask", reason=row["reason"]) for row in rows)


RuleSet = Literal["hermes_agent"]
"""Names of the sets that ship."""


class CommandPolicy(BaseModel):
    """Rules over commands. The default has none and allows everything."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enforce: Literal["when_not_isolated", "always", "never"] = "when_not_isolated"
    rules: tuple[Rule, ...] = ()
    rule_sets: tuple[RuleSet, ...] = ()
    """Sets of rules that ship, looked at after `rules`. `hermes_agent`: what hermes-agent asks about."""
    default: Action = "allow"

    def all_rules(self) -> tuple[Rule, ...]:
        """Own rules first: one of them can allow what a set would ask about."""
        return (*self.rules, *(rule for name in self.rule_sets for rule in rule_set(name)))

    def decides(self, isolation: str) -> bool:
        """Whether there is anything to decide on a slot of this isolation level."""
        if not (self.rules or self.rule_sets) and self.default == "allow":
            return False
        if self.enforce != "when_not_isolated":
            return self.enforce == "always"
        return not isolation.startswith(ISOLATED_LEVELS)

    def match(self, tool: str, text: str) -> tuple[Action, Rule | None]:
        """What the rules say about this text. Only the text as it is may be allowed by a rule of its own."""
        read = as_a_shell_reads(text)
        for rule in self.all_rules():
            forms = {text} if rule.action == "allow" else {text, read}
            if (not rule.tools or tool in rule.tools) and any(
                re.search(rule.pattern, form, re.DOTALL) for form in forms
            ):
                return rule.action, rule
        return self.default, None


_CONTINUED = re.compile(r"\\\r?\n|\$\{IFS\b[^}]{0,20}\}|\$IFS\b")
_INSIDE_A_WORD = re.compile(r"(?<=\w)(?:\\|\"\"|'')(?=\w)")


def as_a_shell_reads(text: str) -> str:
    """The text without what a shell or a terminal drops: line continuations, `$IFS`, escapes inside words and control
    codes; wide letters as plain ones."""
    plain = strip_ansi(unicodedata.normalize("NFKC", text)).replace("\0", "")
    return _INSIDE_A_WORD.sub("", _CONTINUED.sub(" ", plain))


@dataclass(frozen=True)
class Decision:
    """What was decided about one call; goes into its record."""

    allowed: bool
    action: Action
    rule: str | None = None
    reason: str = ""

    def as_metadata(self) -> dict[str, Any]:
        """The form kept in the call's record."""
        return {"allowed": self.allowed, "action": self.action, "rule": self.rule, "reason": self.reason}


class PolicyCheck:
    """The policy of one rollout: decides each call, asking the user's callback where a rule says so."""

    def __init__(self, policy: CommandPolicy, ask: AskCallback | None, always: set[str] | None = None) -> None:
        """`always` is the run's memory of rules that were answered so; every rollout of the run is given the same."""
        self._policy = policy
        self._ask = ask
        self._session: set[str] = set()
        self._always = always if always is not None else set()

    async def decide(self, tool: str, text: str | None) -> Decision | None:
        """The decision, or None for a tool that runs no commands."""
        if text is None:
            return None
        action, rule = await work_out(len(text), self._policy.match, tool, text)
        pattern, reason = (rule.pattern, rule.reason) if rule else (None, "")
        if action != "ask":
            return Decision(action == "allow", action, pattern, reason)
        if self._ask is None:
            return Decision(False, action, pattern, reason or "there is nobody to ask")
        key = pattern or ""
        if key in self._session or key in self._always:
            return Decision(True, action, pattern, reason)
        answer = await self._ask(tool, text, reason)
        if answer == "session":
            self._session.add(key)
        elif answer == "always":
            self._always.add(key)
        return Decision(answer is not False and answer != "deny", action, pattern, reason)


def command_text(tool: str, arguments: dict[str, Any]) -> str | None:
    """The part of a call that the rules look at, or None when the tool runs no command."""
    if tool == "terminal":
        return str(arguments.get("command", ""))
    if tool == "execute_code":
        return str(arguments.get("code", ""))
    if tool == "process" and arguments.get("action") in ("write", "submit"):
        return str(arguments.get("data", ""))
    return None
