"""Which commands may run, for users whose slots are not isolated. Off where the slot itself isolates them.

Rules are tried in order; the first whose pattern is found in the text decides, else `default`. The text is a terminal
command, the code of a script, or input typed into a process. Regular expressions over shell text are a guard against
accidents, not a defence against an attacker: for that, use an isolated slot.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

Action = Literal["allow", "deny", "ask"]
AskCallback = Callable[[str, str], Awaitable[bool]]
"""Given the tool's name and the text, says whether it may run."""

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


DANGEROUS_COMMANDS: tuple[Rule, ...] = tuple(
    Rule(pattern=pattern, action="ask", reason=reason)
    for pattern, reason in (
        (r"\brm\s+(-\w+\s+)*(/|~|\$HOME)(\s|/?\*|$)", "deletes a whole tree at the root or home"),
        (r"\bmkfs(\.\w+)?\b", "makes a file system"),
        (r"\bdd\b.*\bof=/dev/", "writes to a device"),
        (r">\s*/dev/(sd|nvme|vd|hd)", "writes to a disk"),
        (r"\b(shutdown|reboot|halt|poweroff)\b", "stops the machine"),
        (r":\(\)\s*\{.*\|.*&\s*\}", "is a fork bomb"),
        (r"\b(curl|wget)\b[^|;]*\|\s*(sudo\s+)?(ba|z|da)?sh\b", "runs what it downloads"),
        (r"\bchmod\s+(-\w+\s+)*[0-7]*777\s+/", "opens the root directory to everybody"),
        (r"\bkill\s+(-\w+\s+)*-1\b", "kills every process"),
        (r">\s*/etc/|\btee\s+(-a\s+)?/etc/", "writes system configuration"),
    )
)
"""A start for users of the plain level; extend it as you need."""


class CommandPolicy(BaseModel):
    """Rules over commands. The default has none and allows everything."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enforce: Literal["when_not_isolated", "always", "never"] = "when_not_isolated"
    rules: tuple[Rule, ...] = ()
    default: Action = "allow"

    def active(self, isolation: str) -> bool:
        """Whether the rules are looked at on a slot of this isolation level."""
        if self.enforce != "when_not_isolated":
            return self.enforce == "always"
        return not isolation.startswith(ISOLATED_LEVELS)

    def match(self, tool: str, text: str) -> tuple[Action, Rule | None]:
        """What the rules say about this text."""
        for rule in self.rules:
            if (not rule.tools or tool in rule.tools) and re.search(rule.pattern, text, re.DOTALL):
                return rule.action, rule
        return self.default, None


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

    def __init__(self, policy: CommandPolicy, isolation: str, ask: AskCallback | None) -> None:
        self._policy = policy
        self.active = policy.active(isolation) and (bool(policy.rules) or policy.default != "allow")
        """Whether there is anything to decide on this rollout's sandbox."""
        self._ask = ask

    async def decide(self, tool: str, text: str | None) -> Decision | None:
        """The decision, or None when there is nothing to decide (policy off, or a tool that runs no commands)."""
        if not self.active or text is None:
            return None
        action, rule = self._policy.match(tool, text)
        pattern, reason = (rule.pattern, rule.reason) if rule else (None, "")
        if action == "ask":
            allowed = await self._ask(tool, text) if self._ask else False
            return Decision(allowed, action, pattern, reason or ("" if self._ask else "there is nobody to ask"))
        return Decision(action == "allow", action, pattern, reason)


def command_text(tool: str, arguments: dict[str, Any]) -> str | None:
    """The part of a call that the rules look at, or None when the tool runs no command."""
    if tool == "terminal":
        return str(arguments.get("command", ""))
    if tool == "execute_code":
        return str(arguments.get("code", ""))
    if tool == "process" and arguments.get("action") in ("write", "submit"):
        return str(arguments.get("data", ""))
    return None
