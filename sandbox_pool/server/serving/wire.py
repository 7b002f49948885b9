"""Frames between client and slot server: u32 length, u32 header length, JSON header, raw body. See PROTOCOL.md."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

try:  # an accelerator where it happens to be installed; the server must not need it
    import orjson

    _dumps: Callable[[Any], bytes] = orjson.dumps
    _loads: Callable[[bytes], Any] = orjson.loads
except ImportError:
    _dumps = lambda value: json.dumps(value, separators=(",", ":")).encode()  # noqa: E731
    _loads = json.loads

PROTOCOL = 1
CHUNK = 256 << 10
"""Bytes per data frame of a stream."""
WINDOW = 8
"""Data frames a sender may have unacknowledged, so that one slow stream never fills memory or blocks the others."""
MAX_FRAME = 64 << 20
MAX_HELLO = 16 << 10
"""A peer that has not shown its token yet cannot make the server hold more than this."""
LINE_NUMBER = 8
"""Bytes that come with each descriptor on a connection for descriptors."""

Header = dict[str, Any]
_LENGTHS = struct.Struct("!II")


class WireError(Exception):
    """The peer sent something that is not a frame."""


def encode(header: Header, body: bytes = b"") -> bytes:
    """One frame."""
    text = _dumps(header)
    return _LENGTHS.pack(4 + len(text) + len(body), len(text)) + text + body


class Decoder:
    """Cuts a byte stream into frames."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[Header, bytes]]:
        """Add received bytes; return the frames they complete."""
        buffer = self._buffer
        buffer += data
        frames: list[tuple[Header, bytes]] = []
        start = 0
        while len(buffer) - start >= 8:
            length, header_length = _LENGTHS.unpack_from(buffer, start)
            if length > self.max_frame or header_length > length - 4:
                raise WireError(f"frame of {length} bytes refused")
            end = start + 4 + length
            if len(buffer) < end:
                break
            body_at = start + 8 + header_length
            try:
                header = _loads(bytes(buffer[start + 8 : body_at]))
            except ValueError as exc:
                raise WireError("frame header is not JSON") from exc
            if not isinstance(header, dict):
                raise WireError("frame header is not an object")
            frames.append((header, bytes(buffer[body_at:end])))
            start = end
        if start:
            del buffer[:start]
        return frames
