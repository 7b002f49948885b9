"""Reads the key-value header of a GGUF file: a vocabulary in a tenth of a second, without touching the weights."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's value types by number, as struct codes."""


def read_metadata(path: Path) -> dict[str, Any]:
    """Every key of the header; raises ValueError when the file is no GGUF."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != MAGIC:
            raise ValueError(f"{path}: not a GGUF file")
        reader = _Reader(data, 8)
        _tensors, count = reader.scalar("Q"), reader.scalar("Q")
        return {reader.string(): reader.value(reader.scalar("I")) for _ in range(count)}


class _Reader:
    """A position in the file."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data, self._position = data, position

    def scalar(self, code: str) -> Any:
        """One number."""
        (value,) = self._unpack(f"<{code}")
        return value

    def string(self) -> str:
        """A length and that many bytes."""
        size = self.scalar("Q")
        start, self._position = self._position, self._position + size
        return self._data[start : start + size].decode("utf-8")

    def value(self, kind: int) -> Any:
        """A value of a given type; arrays may nest."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in SCALARS:
            return list(self._unpack(f"<{count}{SCALARS[inner]}"))
        return [self.value(inner) for _ in range(count)]

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return values
