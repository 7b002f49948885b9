"""Renders calls with real chat templates, the way transformers does."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from support.parsers_writers import TOOLS, Call

CONVERSATION = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>", "pad_token": "<PAD>"}


@cache
def _compiled(path: Path) -> Any:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(path.read_text())


def _render(path: Path, messages: list[dict[str, Any]]) -> str:
    return str(_compiled(path).render(messages=messages, tools=TOOLS, add_generation_prompt=False, **TOKENS))


def turn(path: Path, calls: list[Call], *, as_text: bool) -> str:
    """The assistant's turn with these calls, as the template writes it; arguments as objects or as JSON text."""
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": f"abcdefgh{index}",
                "function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ],
    }
    with_calls = _render(path, [*CONVERSATION, message])
    return with_calls[_shared(with_calls, _render(path, CONVERSATION)) :]


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@cache
def argument_style(path: Path) -> bool | None:
    """Whether the template wants arguments as text (True) or objects (False); None when it renders no calls."""
    for as_text in (False, True):
        try:
            if "PROBE" in turn(path, [("write_file", {"path": "PROBE"})], as_text=as_text):
                return as_text
        except Exception:  # noqa: BLE001, S112 - a template may raise anything; then it renders no calls in this style
            continue
    return None
