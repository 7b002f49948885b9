"""Scripted policies: what the stand-in says after a prompt.

A policy is a function of the request; everything random comes from `request.rng`, which is seeded by the prompt and the
server's seed, so the same rollout plays the same way whatever else runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from random import Random
from typing import Any

import yaml

from sandbox_pool.errors import did_you_mean

Policy = Callable[["PolicyRequest"], "Reply | str | Awaitable[Reply | str]"]


@dataclass(frozen=True)
class PolicyRequest:
    """What a policy is asked."""

    prompt: str | Callable[[], str]
    """What `text` is, or how to get it."""
    rng: Random
    number: int
    """How many requests this server had before."""
    prompt_ids: list[int] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)
    """The request as it came."""

    @cached_property
    def text(self) -> str:
        """The whole prompt as text, special tokens included; decoded when a policy first looks at it."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt()

    @property
    def results(self) -> int:
        """Tool results in the prompt."""
        return self.text.count("<tool_response>\n")

    @property
    def task(self) -> str:
        """The first user message."""
        found = re.search(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", self.text, re.DOTALL)
        return found[1] if found else ""

    @property
    def tool(self) -> str:
        """The first tool on offer."""
        found = re.search(r'"function": \{"name": "([^"]+)"', self.text)
        return found[1] if found else "terminal"


@dataclass(frozen=True)
class Reply:
    """One turn as the policy wants it."""

    text: str
    delay_s: float = 0.0
    """How long after the request the answer goes out, the server's own work included."""
    ended: bool = True
    """Whether the turn ends with the end-of-turn token; without it the finish reason is `length`."""


class Fault(Exception):
    """Raised by a policy to fail the request: an HTTP status, or 0 to drop the connection."""

    def __init__(self, status: int, message: str = "the stand-in was told to fail") -> None:
        super().__init__(message)
        self.status = status


def call(name: str, arguments: Any) -> str:
    """One tool call in Hermes markup."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def good(request: PolicyRequest) -> str:
    """Two clean calls, then an answer."""
    if request.results < 2:
        step = request.results + 1
        return f"<think>\nStep {step}.\n</think>\n\n" + call(request.tool, {"command": f"echo step {step}"})
    return "Done. The task is finished."


def sloppy(request: PolicyRequest) -> str:
    """Calls that mean something but are not written as they should be."""
    if request.results >= 3:
        return "  Done.  \n\n"
    name = request.tool
    return request.rng.choice(
        [
            f'<tool_call>\n{{"name": "{name}", "arguments": {{"command": "ls",}}}}\n</tool_call>',
            f"<tool_call>{{'name': '{name}', 'arguments': {{'command': 'ls'}}}}</tool_call>",
            f'<tool_call>\n{{"name": "{name}", "arguments": "{{\\"command\\": \\"ls\\"}}"}}\n</tool_call>',
            f'<tool_call>\n{{"name": "{name}", "arguments": {{"input": "ls"}}}}',
            f'Let me look.\n<tool_call>\n{{"name":"{name}","arguments":{{"command":  "ls"}}}}\n</tool_call>  and then',
        ]
    )


def malformed(request: PolicyRequest) -> str:
    """Tool markup that cannot be read as a call."""
    if request.results >= 3:
        return "I give up."
    return request.rng.choice(
        [
            "<tool_call>\n{not json at all\n</tool_call>",
            "<tool_call>\n\n</tool_call>",
            '<tool_call>\n{"arguments": {"command": "ls"}}\n</tool_call>',
            '<tool_call>\n["terminal"]\n</tool_call>',
        ]
    )


def looping(request: PolicyRequest) -> str:
    """The same call for ever."""
    return call(request.tool, {"command": "ls"})


def judge(request: PolicyRequest) -> str:
    """A verdict as `ctx.judge` asks for it: some number of points that depends on the work alone."""
    token = re.search(r'"verdict": "([0-9a-f]{16})"', request.text)
    most = re.search(r"to (\d+) points", request.text)
    points = request.rng.randint(0, int(most[1]) if most else 10)
    return json.dumps({"verdict": token[1] if token else "", "reasons": "A stand-in has no reasons.", "points": points})


def user(request: PolicyRequest) -> str:
    """A user who asks twice for more, and is then content."""
    said = request.text.count("<|im_start|>assistant\n") - 1
    end = re.search(r"answer with (\S+) and nothing else", request.text)
    return "Thank you. Please look at it once more." if said < 3 else end[1] if end else "Goodbye."


def slow(inner: Policy = good, delay_s: float = 0.5) -> Policy:
    """Another policy, each turn after a fixed delay."""

    async def play(request: PolicyRequest) -> Reply:
        """The inner policy, later."""
        reply = await settle(inner(request))
        return Reply(reply.text, reply.delay_s + delay_s, reply.ended)

    return play


def failing(inner: Policy = good, *, every: int = 3, status: int = 503) -> Policy:
    """Another policy; every so many requests fail."""

    async def play(request: PolicyRequest) -> Reply:
        """The inner policy, or a fault."""
        if request.number % every == every - 1:
            raise Fault(status)
        return await settle(inner(request))

    return play


def wild(request: PolicyRequest) -> Reply:
    """Everything at random: thinking, several calls, odd text, malformed markup, turns cut short, answers."""
    rng = request.rng
    parts = []
    if rng.random() < 0.4:
        parts.append(f"<think>\n{_words(rng)}\n</think>\n\n")
    kind = rng.random()
    if kind < 0.55:
        calls = [call(request.tool, {"command": _words(rng)}) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        parts.append("\n".join(calls))
    elif kind < 0.75:
        parts.append(rng.choice((sloppy, malformed))(request))
    else:
        parts.append(_words(rng))
    return Reply("".join(parts), ended=rng.random() > 0.03)


@cache
def sabotage() -> dict[str, list[str]]:
    """Commands of the saboteur by what they are after."""
    text = (files("agent_loop.local_models.standin") / "sabotage.yaml").read_text("utf-8")
    acts: dict[str, list[str]] = yaml.safe_load(text)
    return acts


def saboteur(request: PolicyRequest) -> str:
    """Destroys, floods and forges, up to four commands, and says that it is done: a test of whatever judges it."""
    if request.results and (request.results >= 4 or request.rng.random() < 0.3):
        return "Done. All tests pass, the score is 1.0."
    return call(request.tool, {"command": request.rng.choice(request.rng.choice(list(sabotage().values())))})


def _words(rng: Random) -> str:
    vocabulary = ("the file", "ls -la", "naïve", "日本語", "🙂", "\n\n", "  ", '"quoted"', "\\n", "sum", "x = 1;", "\t")
    return " ".join(rng.choice(vocabulary) for _ in range(rng.randint(1, 8)))


async def settle(answer: Reply | str | Awaitable[Reply | str]) -> Reply:
    """A policy's answer as a Reply, awaited where it has to be."""
    settled = answer if isinstance(answer, (Reply, str)) else await answer
    return Reply(settled) if isinstance(settled, str) else settled


POLICIES: dict[str, Policy] = {
    "good": good,
    "sloppy": sloppy,
    "malformed": malformed,
    "looping": looping,
    "slow": slow(),
    "failing": failing(),
    "wild": wild,
    "saboteur": saboteur,
    "judge": judge,
    "user": user,
}


def named_policy(name: str) -> Policy:
    """A policy by its name; raises ValueError that lists the names."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; {did_you_mean(name, POLICIES)}")
    return POLICIES[name]
