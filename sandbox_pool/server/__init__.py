"""The slot server: one program with N isolated slots, run wherever slots live (standard library, Python 3.9+)."""

from __future__ import annotations


def pack(*, compiled: bool = True) -> bytes:
    """The whole server as one file that a provider copies somewhere and starts with Python 3.9 or later.

    Without `compiled`, or where there is no C compiler, the slot helper in it is the one written in Python.
    """
    from .build.packing import build

    return build(compiled)
