"""Scripted policies that know the solutions of their tasks: what differs is how well they write their calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from agent_loop.local_models.standin.policies import Policy, PolicyRequest, call
from agent_loop.model.backends.backend import ITEM

TURN = "<|im_start|>assistant\n"

LEFT_OUT = 0.3
"""Share of the turns at which `mixed` gives up."""
GIVEN_UP = "I think that is all."
Writer = Callable[[str, Random], str]
"""A command as the policy's turn."""
Step = str | Mapping[str, Any]
"""One turn of a solution: a shell command, a call `{"name", "arguments"}`, several of them as `{"calls": [...]}`, or
`{"content"}`, a turn without calls; with a content of None it says what the last command printed."""


def checked_steps(steps: Any) -> Sequence[Step]:
    """The steps of a solution; ValueError that names the first which is none."""
    if isinstance(steps, str) or not isinstance(steps, Sequence):
        raise ValueError(f"it is not a list of steps: {steps!r:.60}")
    for number, step in enumerate(steps, 1):
        if not _is_step(step):
            kinds = 'a shell command, {"name", "arguments"}, {"calls": [...]} or {"content"}'
            raise ValueError(f"step {number} is {step!r:.60}, not {kinds}")
    return steps


def _is_step(step: Any) -> bool:
    if not isinstance(step, Mapping):
        return isinstance(step, str)
    if "content" in step:
        return step["content"] is None or isinstance(step["content"], str)
    if "calls" in step:
        return isinstance(step["calls"], Sequence) and all(map(_is_call, step["calls"]))
    return _is_call(step)


def _is_call(call: Any) -> bool:
    return (
        isinstance(call, Mapping)
        and isinstance(call.get("name"), str)
        and isinstance(call.get("arguments", {}), Mapping)
    )


def good(command: str, rng: Random) -> str:
    """One clean call."""
    return _terminal(command)


def sloppy(command: str, rng: Random) -> str:
    """Calls that mean the right thing and are written wrong; now and then a command that does nothing."""
    if rng.random() < 0.2:
        return _terminal("ls")
    as_json = json.dumps(command)
    twice = json.dumps(json.dumps({"command": command}))
    return rng.choice(
        [
            f'<tool_call>\n{{"name": "terminal", "arguments": {{"command": {as_json},}}}}\n</tool_call>',
            f'<tool_call>\n{{"name": "terminal", "arguments": {twice}}}\n</tool_call>',
            f'<tool_call>\n{{"name": "terminal", "arguments": {{"input": {as_json}}}}}\n</tool_call>',
            f"Let me do that.\n{_terminal(command)}",
        ]
    )


def malformed(command: str, rng: Random) -> str:
    """Mostly tool markup that cannot be read as a call; one time in four it comes out right."""
    if rng.random() < 0.25:
        return _terminal(command)
    return rng.choice(
        [
            f"<tool_call>\n{{name: terminal, {command}\n</tool_call>",
            f'<tool_call>\n{{"arguments": {{"command": {json.dumps(command)}}}}}\n</tool_call>',
            f"<tool_call>\n{command}\n</tool_call>",
            f'<tool_call>\n{{"name": "shell", "arguments": {{"command": {json.dumps(command)}}}}}\n</tool_call>',
        ]
    )


def mixed(command: str, rng: Random) -> str:
    """Of mixed quality, so that a group has rollouts that succeed and rollouts that fail."""
    share = rng.random()
    if share < LEFT_OUT:
        return GIVEN_UP
    return (good if share < 0.7 else sloppy if share < 0.85 else malformed)(command, rng)


SOLVERS: dict[str, Writer] = {"solver": mixed, "oracle": good}
"""How the stand-in plays the solutions of an environment, by the name of the policy."""
WRITERS: dict[str, Writer] = {"good": good, "sloppy": sloppy, "malformed": malformed}


def solver(solutions: Mapping[str, Sequence[Step]], writer: Writer = mixed) -> Policy:
    """Plays the steps that solve each item, which the request names (`ITEM`) or its prompt tells.

    Everything random follows from the seed of the request; requests without a seed play differently each time.
    """

    def play(request: PolicyRequest) -> str:
        steps, done = _asked(request, solutions)
        if steps is None:
            return "I do not know this task."
        if done >= len(steps):
            return "Done."
        seed = request.body.get("seed")
        rng = Random(f"{request.number if seed is None else seed}:{done}")
        step = steps[done]
        if isinstance(step, str):
            return writer(step, rng)
        return GIVEN_UP if writer is mixed and rng.random() < LEFT_OUT else _said(step, request)

    return play


def _asked(request: PolicyRequest, solutions: Mapping[str, Sequence[Step]]) -> tuple[Sequence[Step] | None, int]:
    """The steps that solve what is asked, and how many turns were played. The last assistant is yet to speak."""
    named = request.body.get(ITEM)
    if named is not None:
        return solutions.get(str(named["id"])), request.text.count(TURN) - 1 - int(named["said"])
    prompt = next((prompt for prompt in solutions if _as_user(prompt) in request.text), None)
    if prompt is None:
        return None, 0
    return solutions[prompt], request.text.split(_as_user(prompt), 1)[1].count(TURN) - 1


def _said(step: Mapping[str, Any], request: PolicyRequest) -> str:
    if "content" in step:
        return _printed(request) if step["content"] is None else str(step["content"])
    return "\n".join(call(str(one["name"]), one.get("arguments", {})) for one in step.get("calls", [step]))


def _printed(request: PolicyRequest) -> str:
    """By the last command."""
    answers = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", request.text, re.DOTALL)
    try:
        return str(json.loads(answers[-1])["output"]).strip()
    except (IndexError, ValueError, KeyError, TypeError):
        return GIVEN_UP


def _as_user(prompt: str) -> str:
    return f"<|im_start|>user\n{prompt}<|im_end|>"


def _terminal(command: str) -> str:
    return call("terminal", {"command": command})
