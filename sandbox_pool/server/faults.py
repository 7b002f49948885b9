"""Faults the server reports to its client by kind; the client turns each kind into its own exception."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

TimedOut = asyncio.TimeoutError
"""What `wait_for` raises: another class than the builtin one before Python 3.11."""


class SlotError(Exception):
    """`kind` is one of: stale, lost, destroyed, protocol, file, isolation, scratch, refused, image, layers."""

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        errno: int | None = None,
        path: str | None = None,
        layers: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.layers = list(layers)
        """Of kind `layers`: what the host lacks for a lease."""
        self.kind = kind
        self.errno = errno
        self.path = path

    def to_wire(self) -> dict[str, Any]:
        """As it travels in a response."""
        return {"kind": self.kind, "message": str(self), "errno": self.errno, "path": self.path, "layers": self.layers}


def file_error(number: int, path: str) -> SlotError:
    """A refused file call."""
    return SlotError("file", os.strerror(number), errno=number, path=path)
