"""Scripted policies that know the solutions of their tasks: what differs is how well they write their calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from agent_loop.local_models.standin.policies import Policy, PolicyRequest, call

Writer = Callable[[str, Random], str]
"""A command as the policy's turn."""
Step = str | Mapping[str, Any]
"""One turn of a solution: a shell command, a call `{"name", "arguments"}`, or `{"content"}`, a turn without calls."""


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
    if share < 0.3:
        return "I think that is all."
    return (good if share < 0.7 else sloppy if share < 0.85 else malformed)(command, rng)


WRITERS: dict[str, Writer] = {"good": good, "sloppy": sloppy, "malformed": malformed}


def solver(solutions: Mapping[str, Sequence[Step]], writer: Writer = mixed) -> Policy:
    """Plays the steps that solve each prompt; everything random follows from the seed of the request.

    Requests without a seed play differently each time.
    """

    def play(request: PolicyRequest) -> str:
        asked = next((prompt for prompt in solutions if _as_user(prompt) in request.text), None)
        if asked is None:
            return "I do not know this task."
        # The last assistant in the prompt is the turn that is to be written.
        done = request.text.split(_as_user(asked), 1)[1].count("<|im_start|>assistant\n") - 1
        if done >= len(solutions[asked]):
            return "Done."
        seed = request.body.get("seed")
        rng = Random(f"{request.number if seed is None else seed}:{done}")
        step = solutions[asked][done]
        return writer(step, rng) if isinstance(step, str) else _said(step, rng)

    return play


def _said(step: Mapping[str, Any], rng: Random) -> str:
    """A step that is not a shell command, left out now and then."""
    if rng.random() < 0.3:
        return "I think that is all."
    return str(step["content"]) if "content" in step else call(str(step["name"]), step.get("arguments", {}))


def _as_user(prompt: str) -> str:
    return f"<|im_start|>user\n{prompt}<|im_end|>"


def _terminal(command: str) -> str:
    return call("terminal", {"command": command})
