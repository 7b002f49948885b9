"""The slot server: one program with N isolated slots, run wherever slots live (standard library, Python 3.9+)."""

from __future__ import annotations


def pack() -> bytes:
    """The whole server as one file that a provider copies somewhere and starts with Python 3.9 or later."""
    from .packing import build

    return build()
