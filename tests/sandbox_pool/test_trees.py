"""Trees on their way to a slot: whoever stops waiting for one sees that, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_pool.client import trees


async def test_an_upload_that_is_cancelled_while_a_file_is_read_ends_as_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def pieces(source: Path, name: str) -> Iterator[bytes]:
        with contextlib.ExitStack() as stack:
            stack.callback(closed.set)
            inside.set()
            assert go_on.wait(10)
            yield b"piece"

    async def send() -> list[bytes]:
        return [piece async for piece in trees.pack_local(tmp_path, "x")]

    monkeypatch.setattr(trees, "_pieces", pieces)
    sending = asyncio.create_task(send())
    await asyncio.to_thread(inside.wait, 10)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    go_on.set()
    assert await asyncio.to_thread(closed.wait, 10)
