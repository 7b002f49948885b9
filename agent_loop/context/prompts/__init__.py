"""Texts that the loop puts before a model."""

from __future__ import annotations

from importlib import resources


def load(name: str) -> str:
    """The text of `agent_loop/prompts/NAME.txt`."""
    return resources.files(__name__).joinpath(f"{name}.txt").read_text(encoding="utf-8")
