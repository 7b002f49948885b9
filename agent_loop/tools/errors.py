"""How a tool tells the model that a call did not work. A fault of the sandbox itself never becomes one of these."""

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
    """An unknown toolset, tool or distribution, or a selection without any tool. For the user, not for the model."""
