"""What a check has to work with: leases, the host behind them, and a secret of the host's to try to reach."""

from __future__ import annotations

import asyncio
import functools
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox_pool.conformance.check import expect
from sandbox_pool.pool.lease import Lease, LeaseRequest
from sandbox_pool.server.isolation.levels import WORKDIR
from sandbox_pool.spec import SandboxSpec

if TYPE_CHECKING:
    from sandbox_pool.client.host_client import HostClient, HostInfo
    from sandbox_pool.pool.pool import SlotPool


@dataclass(frozen=True)
class HostSecret:
    """A file on the machine of the slot server that no slot may read, change or remove."""

    path: str
    text: str

    @property
    def name(self) -> str:
        """Its file name."""
        return Path(self.path).name

    @property
    def folder(self) -> str:
        """The folder it is in."""
        return str(Path(self.path).parent)

    def read(self) -> str:
        """What it says now."""
        return Path(self.path).read_text()

    def open_to_all(self) -> None:
        """Let every user of the machine read it."""
        Path(self.path).chmod(0o644)
        Path(self.folder).chmod(0o755)

    def sibling(self, prefix: str) -> Path:
        """Another path in the same folder."""
        return Path(self.folder) / f"{prefix}{self.name}"


class CheckContext:
    """One per pool under check."""

    def __init__(
        self, pool: SlotPool, info: HostInfo, on_this_machine: bool, absent: frozenset[str] = frozenset()
    ) -> None:
        self.pool = pool
        self.info = info
        self.on_this_machine = on_this_machine
        self.absent = absent
        """What the image under check lacks (`runner.TOOLS`)."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def lease(self, spec: SandboxSpec | None = None, timeout_s: float = 30.0) -> LeaseRequest:
        """A sandbox for this check, in the image that is checked; its working directory may be full of files."""
        default = self.pool.config.spec
        if default.image is not None:
            spec = spec or default
            own = {"image": default.image, "user": default.user} if spec.image is None else {}
            spec = spec.model_copy(update={**own, "workdir": spec.workdir or WORKDIR})
        return self.pool.lease(f"check-{secrets.token_hex(3)}", spec, timeout_s)

    @asynccontextmanager
    async def two(self, spec: SandboxSpec | None = None) -> AsyncIterator[tuple[Lease, Lease]]:
        """Two leases on one host at the same time."""
        async with self.lease(spec) as one, self.lease(spec) as other:
            expect(one.host == other.host, "the two leases are on different hosts; check with max_hosts=1")
            yield one, other

    async def connect(self, token: str | None = None) -> HostClient:
        """A second client of the host, with its token or another."""
        async with self.lease() as box:
            host = box.endpoint
        return await self.pool.connect(host.address, host.token if token is None else token)

    async def host_secret(self) -> HostSecret:
        """A file that only the owner of the slot server's machine can read."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hrl-secret-")
        path = Path(self._folder.name) / f"secret-{secrets.token_hex(4)}"
        text = f"host secret {secrets.token_hex(8)}"
        path.touch(mode=0o600)
        path.write_text(text)
        return HostSecret(str(path), text)

    @staticmethod
    def unique_seconds() -> str:
        """A number to sleep for that no other process sleeps for: where slots see each other, checks must not."""
        return str(10**6 + secrets.randbelow(10**6))

    async def until(self, condition: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
        """Wait until the condition holds."""
        deadline_s = time.monotonic() + timeout_s
        while not await condition():
            expect(time.monotonic() < deadline_s, f"not true after {timeout_s:g} s: {functools.partial(condition)}")
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Remove the secrets."""
        if self._folder is not None:
            self._folder.cleanup()
