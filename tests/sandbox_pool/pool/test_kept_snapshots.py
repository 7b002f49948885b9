"""Snapshots kept as files: complete or absent, whatever happens to who writes them."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_pool.pool.kept_snapshots import KeptSnapshots

WRITER = """
    import asyncio, sys
    from pathlib import Path
    from sandbox_pool.pool.kept_snapshots import KeptSnapshots

    async def chunks(number):
        for _ in range(64):
            yield bytes([number]) * 4096

    async def main():
        kept = KeptSnapshots(Path(sys.argv[1]), 100)
        for number in range(int(sys.argv[2])):
            await kept.keep(f"key{number % 7}", chunks(number % 7))
            print("kept", flush=True)

    asyncio.run(main())
"""


def writer(state: Path, rounds: int) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-c", textwrap.dedent(WRITER), str(state), str(rounds)]
    return subprocess.Popen(program, stdout=subprocess.PIPE)


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


def content(kept: KeptSnapshots, key: str) -> bytes | None:
    file = kept.open(key)
    if file is None:
        return None
    with file:
        return file.read()


async def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    kept = KeptSnapshots(tmp_path, 1)
    assert content(kept, "a") is None
    await kept.keep("a", pieces(b"one", b"two"))
    assert content(KeptSnapshots(tmp_path, 1), "a") == b"onetwo"


async def test_those_not_used_for_longest_go_first(tmp_path: Path) -> None:
    kept = KeptSnapshots(tmp_path, 3)
    for number, key in enumerate("abc"):
        await kept.keep(key, pieces(bytes(1 << 20)))
        os.utime(tmp_path / "snapshots" / f"{key}.snapshot", (number, number))
    assert content(kept, "a") is not None  # used now
    await kept.keep("d", pieces(bytes(1 << 20)))
    assert [key for key in "abcd" if content(kept, key) is not None] == ["a", "c", "d"]


async def test_one_that_is_larger_than_all_may_be_is_not_kept(tmp_path: Path) -> None:
    kept = KeptSnapshots(tmp_path, 1)
    await kept.keep("small", pieces(b"small"))
    await kept.keep("large", pieces(bytes(1 << 20), b"more"))
    assert content(kept, "large") is None
    assert content(kept, "small") == b"small"
    assert [path.name for path in (tmp_path / "snapshots").iterdir()] == ["small.snapshot"]


async def test_one_in_use_stays_readable_when_it_is_removed(tmp_path: Path) -> None:
    kept = KeptSnapshots(tmp_path, 1)
    await kept.keep("a", pieces(b"held"))
    with kept.open("a") or pytest.fail("not kept") as file:
        KeptSnapshots(tmp_path, 0).trim()
        assert content(kept, "a") is None
        assert file.read() == b"held"


async def test_a_failure_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    async def fails() -> AsyncIterator[bytes]:
        yield b"begin"
        raise ConnectionError("the host went away")

    kept = KeptSnapshots(tmp_path, 1)
    with pytest.raises(ConnectionError):
        await kept.keep("a", fails())
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_killed_writers_leave_no_half_file(tmp_path: Path) -> None:
    chance = random.Random(5)
    kept = KeptSnapshots(tmp_path, 100)
    for _ in range(5):
        writers = [writer(tmp_path, 100_000) for _ in range(2)]
        for process in writers:
            assert process.stdout is not None
            for _ in range(chance.randrange(1, 40)):
                assert process.stdout.readline() == b"kept\n"
            process.kill()
            process.wait()
        for number in range(7):
            data = content(kept, f"key{number}")
            assert data is None or data == bytes([number]) * 4096 * 64
        kept.trim()
        assert not list((tmp_path / "snapshots").glob("*.part"))


def test_two_processes_write_at_the_same_time(tmp_path: Path) -> None:
    writers = [writer(tmp_path, 40) for _ in range(2)]
    for process in writers:
        process.communicate()
    assert [process.returncode for process in writers] == [0, 0]
    kept = KeptSnapshots(tmp_path, 100)
    assert all(content(kept, f"key{number}") == bytes([number]) * 4096 * 64 for number in range(7))
    assert not list((tmp_path / "snapshots").glob("*.part"))


async def test_an_unfinished_file_of_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    kept = KeptSnapshots(tmp_path, 1)
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        begun.set()
        yield b"one"
        await go.wait()
        yield b"two"

    task = asyncio.create_task(kept.keep("a", slow()))
    await begun.wait()
    kept.trim()
    go.set()
    await task
    assert content(kept, "a") == b"onetwo"
