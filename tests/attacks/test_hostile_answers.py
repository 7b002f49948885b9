"""What a verifier reads of an agent on this machine costs it no more than its length, and never loses the rollout."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from environments.code_tasks.hidden_tests import CaseTests, Step
from environments.code_tasks.solver import MAX_ANSWER_BYTES, decode
from environments.scoring.contexts import FrozenWorkspace, ToolContext
from environments.terminal_tasks.checks import Check, GzipHolds, TarHolds
from sandbox_pool import PoolConfig, SlotPool
from sandbox_pool.errors import SandboxFileError
from sandbox_pool.results import FileStat

WITH_ONE_HASH = [2305843009213693951 * number for number in range(1, MAX_ANSWER_BYTES // 22)]
"""As integers that many take hours to become a set."""


@pytest.mark.parametrize(
    "answer",
    [
        {"t": "set", "v": WITH_ONE_HASH},
        {"t": "dict", "v": [[number, 0] for number in WITH_ONE_HASH]},
        {"t": "set", "v": [{"t": "tuple", "v": [number]} for number in WITH_ONE_HASH]},
    ],
    ids=["set", "dict", "tuples"],
)
def test_an_answer_does_not_take_time_that_grows_with_its_square(answer: object) -> None:
    with pytest.raises(ValueError, match="one hash"):
        decode(answer)
    test = CaseTests(((Step("call", "f", returns=set()),),))
    assert "unreadable" in test._failures([[{"returns": answer, "args_after": []}]])[0]


class OneFile:
    """A workspace in which every path is this file."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def read_file(self, path: str) -> bytes:
        return self.data

    async def stat(self, path: str) -> FileStat:
        return FileStat("file", len(self.data), 0o644, 0)


def archive(size: int = 1, **headers: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as writer:
        member = tarfile.TarInfo("a")
        member.size, member.pax_headers = size, headers
        writer.addfile(member, io.BytesIO(bytes(size)))
    return packed.getvalue()


NO_ARCHIVES: dict[str, tuple[Check, bytes]] = {
    "sparse map": (TarHolds("x", (), False), archive(**{"GNU.sparse.map": "x,y"})),
    "odd sparse map": (TarHolds("x", (), False), archive(**{"GNU.sparse.map": "1"})),
    "sparse size": (
        TarHolds("x", (), True),
        gzip.compress(archive(**{"GNU.sparse.size": "z", "GNU.sparse.map": "1,2"})),
    ),
    "zeros": (TarHolds("x", (), True), gzip.compress(bytes(1 << 26))),
    "many parts": (GzipHolds("x", "text"), gzip.compress(b"") * 100_000),
    "not zlib": (GzipHolds("x", "text"), b"\x1f\x8b\x08\x04\xff\xff"),
}


@pytest.mark.parametrize("name", NO_ARCHIVES)
async def test_an_archive_made_to_be_none_is_a_wrong_answer(name: str) -> None:
    check, data = NO_ARCHIVES[name]
    assert await check.failure(OneFile(data))  # type: ignore[arg-type]


@pytest.fixture
def place() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="answers-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
async def pool(place: Path) -> AsyncIterator[SlotPool]:
    """Where slots have no user of their own, so that modes hold for a verifier as well."""
    user = {"user": "nobody", "python": "/usr/bin/python3"} if os.geteuid() == 0 else {}
    config = PoolConfig(
        slots_per_host=2,
        max_hosts=1,
        state_dir=place / "state",
        scratch_dir=place,
        provider_options={"level": "landlock", **user},
    )
    async with SlotPool.from_config(config) as opened:
        yield opened


async def left_by(pool: SlotPool, commands: str) -> ToolContext:
    async with pool.lease("rollout") as sandbox:
        await sandbox.exec(commands)
        frozen = await FrozenWorkspace.take(sandbox, pool)
    return ToolContext(pool.lease_from(frozen.start, "verify"), frozen, "rollout")


async def test_what_is_closed_to_a_verifier_is_the_agents_answer(pool: SlotPool) -> None:
    """A fault of the reward code would make the rollout untrainable."""
    ctx = await left_by(pool, "mkdir tests; echo 1 > tests/a; echo needle > b; chmod 000 tests b")
    for asked in (
        ctx.put_tests({"tests/a": "x"}),
        ctx.remove("tests/a"),
        ctx.search("needle"),
        ctx.search("x", "gone"),
    ):
        with pytest.raises(SandboxFileError):
            await asked
    await ctx.close()


async def test_a_name_with_a_new_line_does_not_show_lines_of_another_file(pool: SlotPool) -> None:
    ctx = await left_by(pool, "mkdir $'x\\n.'; echo forged > $'x\\n./config'; echo true > config")
    assert [(hit.path, hit.line, hit.text) for hit in await ctx.search("forged")] == [("./x\n./config", 1, "forged")]
    with pytest.raises(ValueError, match="failed"):
        await ctx.search("(")
    await ctx.close()
