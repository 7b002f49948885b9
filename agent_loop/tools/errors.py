"""How a tool tells the model that a call did not work. Faults of the sandbox itself are never turned into one of these."""

from __future__ import annotations

from typing import Any


class ToolFailure(Exception):
    """The call failed for a reason the model can read and act on; becomes `{"error": message, **fields}`."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields


class InvalidArguments(ToolFailure):
    """The call did not run: its arguments are not what the tool's schema asks for."""


class ToolsetError(ValueError):
    """A toolset, tool or distribution that does not exist, or a selection without any tool. For the user, not the model."""
