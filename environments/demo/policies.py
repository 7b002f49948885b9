"""Scripted policies of different quality, all knowing the solution: what differs is how well they write their calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random

from agent_loop.standin import Policy, PolicyRequest
from environments.terminal_tasks import TerminalTask

Writer = Callable[[str, Random], str]
"""A command as the policy's turn."""


def good(command: str, rng: Random) -> str:
    """One clean call."""
    return _call(command)


def sloppy(command: str, rng: Random) -> str:
    """Calls that mean the right thing and are written wrong; now and then a command that does nothing."""
    if rng.random() < 0.2:
        return _call("ls")
    as_json = json.dumps(command)
    twice = json.dumps(json.dumps({"command": command}))
    return rng.choice(
        [
            f'<tool_call>\n{{"name": "terminal", "arguments": {{"command": {as_json},}}}}\n</tool_call>',
            f'<tool_call>\n{{"name": "terminal", "arguments": {twice}}}\n</tool_call>',
            f'<tool_call>\n{{"name": "terminal", "arguments": {{"input": {as_json}}}}}\n</tool_call>',
            f"Let me do that.\n{_call(command)}",
        ]
    )


def malformed(command: str, rng: Random) -> str:
    """Mostly tool markup that is no call; one time in four it comes out right."""
    if rng.random() < 0.25:
        return _call(command)
    return rng.choice(
        [
            f"<tool_call>\n{{name: terminal, {command}\n</tool_call>",
            f'<tool_call>\n{{"arguments": {{"command": {json.dumps(command)}}}}}\n</tool_call>',
            f"<tool_call>\n{command}\n</tool_call>",
            f'<tool_call>\n{{"name": "shell", "arguments": {{"command": {json.dumps(command)}}}}}\n</tool_call>',
        ]
    )


WRITERS: dict[str, Writer] = {"good": good, "sloppy": sloppy, "malformed": malformed}


def scripted(tasks: Sequence[TerminalTask], writer: Writer) -> Policy:
    """Plays the solutions of these tasks; everything random follows from the seed of the request."""
    solutions = {f"<|im_start|>user\n{task.prompt}<|im_end|>": task.solution for task in tasks}

    def play(request: PolicyRequest) -> str:
        asked = next((text for text in solutions if text in request.text), None)
        if asked is None:
            return "I do not know this task."
        done = request.text.split(asked, 1)[1].count("<tool_response>")
        solution = solutions[asked]
        if done >= len(solution):
            return "Done."
        return writer(solution[done], Random(f"{request.body.get('seed')}:{done}"))

    return play


def _call(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'terminal', 'arguments': {'command': command}})}\n</tool_call>"
