"""A provider that puts faults between a pool and any real provider.

    config = PoolConfig(provider_options={...})
    async with faulty_pool(config) as (pool, provider):
        provider.faults.on_start("loses_answer")  # the next create happens, and the pool hears that it failed
        async with pool.lease("t") as box:
            provider.faults.freeze(box.host)  # not a byte more in either direction

Everything else is real: the hosts of the provider below, their slots, the pool. `Faults` says what goes wrong, at once
or by chance (`rates`, with a seed). In a config the same provider is `hermes_rl.testing:FaultyProvider`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from sandbox_pool.client.connection import dial as dial_plainly
from sandbox_pool.config import PoolConfig
from sandbox_pool.errors import HostStartFailed, SandboxError
from sandbox_pool.journal.owner import this_process
from sandbox_pool.pool.pool import SlotPool
from sandbox_pool.providers.base import Dials, Host, HostRecord, ProviderContext, checked_options, load_provider
from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)

StartFault = Literal["fails", "loses_answer", "hangs", "twice"]
"""`fails`: nothing is created. `loses_answer`: it is created, and the caller hears of a failure. `hangs`: no answer at
all, until the caller gives up. `twice`: the request is made twice, as by a client that resends it."""
StopFault = Literal["fails", "loses_answer", "hangs"]
PASSED_ON = ("host_key", "adopts", "create_interval_s", "on_host_lost", "job")
"""What a provider may offer besides `start`, `stop` and `list`; `dial` and `close` are here."""


class Rates(BaseModel):
    """Faults by chance: the probability of each per call, or per piece of data that passes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start_fails: float = Field(default=0.0, ge=0, le=1)
    start_loses_answer: float = Field(default=0.0, ge=0, le=1)
    start_hangs: float = Field(default=0.0, ge=0, le=1)
    start_twice: float = Field(default=0.0, ge=0, le=1)
    stop_fails: float = Field(default=0.0, ge=0, le=1)
    stop_loses_answer: float = Field(default=0.0, ge=0, le=1)
    list_fails: float = Field(default=0.0, ge=0, le=1)
    cut: float = Field(default=0.0, ge=0, le=1)
    """A connection ends in the middle of what is sent."""
    duplicate: float = Field(default=0.0, ge=0, le=1)
    """Bytes arrive twice: no TCP does that, but a broken relay may."""
    reorder: float = Field(default=0.0, ge=0, le=1)
    """Bytes change places with those after them."""
    slow_s: float = Field(default=0.0, ge=0)
    """Longest delay of a piece of data; delays are drawn evenly from 0 on, and order is kept."""


class FaultyOptions(BaseModel):
    """`provider_options` of the faulty provider."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: str = "local"
    """The real provider below."""
    provider_options: dict[str, Any] = Field(default_factory=dict)
    rates: Rates = Field(default_factory=Rates)
    seed: int = 0


class Faults:
    """What goes wrong. All calls act at once; hosts are named by `Lease.host`."""

    def __init__(self, rates: Rates | None = None, seed: int = 0) -> None:
        self.rates = rates or Rates()
        self.counts: defaultdict[str, int] = defaultdict(int)
        """How often each fault has happened, by name."""
        self._dice = random.Random(seed)
        self._starts: deque[StartFault] = deque()
        self._stops: deque[StopFault] = deque()
        self._lines: defaultdict[str, set[FaultyLine]] = defaultdict(set)
        self._frozen: set[str] = set()
        self._cut_off: set[str] = set()

    def on_start(self, *faults: StartFault) -> None:
        """The next starts go wrong, in this order."""
        self._starts.extend(faults)

    def on_stop(self, *faults: StopFault) -> None:
        """The next stops go wrong, in this order."""
        self._stops.extend(faults)

    def freeze(self, host: str) -> None:
        """The host stands still: connections stay, new ones are made, and nothing passes."""
        self.counts["freeze"] += 1
        self._frozen.add(host)

    def cut_off(self, host: str) -> None:
        """The host's network is gone: its connections end, and no new one is made. What runs there runs on."""
        self.counts["cut_off"] += 1
        self._cut_off.add(host)
        self.cut(host)

    def come_back(self, host: str) -> None:
        """End `freeze` and `cut_off`. What was held back arrives now."""
        self._cut_off.discard(host)
        self._frozen.discard(host)
        for line in list(self._lines[host]):
            line.release()

    def cut(self, host: str) -> None:
        """End every connection to the host, in the middle of whatever passes."""
        self.counts["cut"] += 1
        for line in list(self._lines[host]):
            line.cut()

    def clear(self) -> None:
        """No more faults: neither planned nor by chance. Hosts that were frozen or cut off come back."""
        self.rates = Rates()
        self._starts.clear()
        self._stops.clear()
        for host in [*self._frozen, *self._cut_off]:
            self.come_back(host)

    def take_start(self) -> StartFault | None:
        """The fault of the next start, if any."""
        if self._starts:
            return self._starts.popleft()
        kinds: tuple[StartFault, ...] = ("fails", "loses_answer", "hangs", "twice")
        return next((kind for kind in kinds if self.happens(f"start_{kind}")), None)

    def take_stop(self) -> StopFault | None:
        """The fault of the next stop, if any."""
        if self._stops:
            return self._stops.popleft()
        kinds: tuple[StopFault, ...] = ("fails", "loses_answer")
        return next((kind for kind in kinds if self.happens(f"stop_{kind}")), None)

    def happens(self, rate: str) -> bool:
        """Throw the dice for one of `rates`."""
        chance: float = getattr(self.rates, rate)
        return chance > 0 and self._dice.random() < chance

    def delay_s(self) -> float:
        """How long the next piece of data is on its way."""
        return self._dice.uniform(0, self.rates.slow_s) if self.rates.slow_s else 0.0

    def is_frozen(self, host: str) -> bool:
        """Whether nothing passes to and from the host."""
        return host in self._frozen

    def is_cut_off(self, host: str) -> bool:
        """Whether the host cannot be reached."""
        return host in self._cut_off

    def add_line(self, host: str, line: FaultyLine) -> None:
        """A connection was made."""
        self._lines[host].add(line)

    def drop_line(self, host: str, line: FaultyLine) -> None:
        """A connection ended."""
        self._lines[host].discard(line)


class FaultyProvider:
    """The provider below, with `faults` between it and the pool."""

    def __init__(self, context: ProviderContext, options: Mapping[str, Any]) -> None:
        chosen = checked_options(FaultyOptions, options)
        self.inner = load_provider(chosen.provider, context, chosen.provider_options)
        self.faults = Faults(chosen.rates, chosen.seed)
        self._names: dict[str, str] = {}
        for name in PASSED_ON:
            if hasattr(self.inner, name):
                setattr(self, name, getattr(self.inner, name))

    async def start(self, name: str, spec: SandboxSpec) -> Host:
        """As the provider below, or with the next fault."""
        fault = self.faults.take_start()
        if fault is not None:
            log.info("start of %s: %s", name, fault)
            self.faults.counts[f"start_{fault}"] += 1
        if fault == "fails":
            raise HostStartFailed(f"{name}: a test says so")
        if fault == "hangs":
            await asyncio.Event().wait()
        host = await self.inner.start(name, spec)
        if fault == "twice":
            host = await self.inner.start(name, spec)
        self._names[host.address] = name
        if fault == "loses_answer":
            raise HostStartFailed(f"{name}: the connection was cut after the create")
        return host

    async def stop(self, name: str) -> None:
        """As the provider below, or with the next fault."""
        fault = self.faults.take_stop()
        if fault is not None:
            self.faults.counts[f"stop_{fault}"] += 1
        if fault == "fails":
            raise SandboxError(f"{name}: the place does not answer")
        if fault == "hangs":
            await asyncio.Event().wait()
        await self.inner.stop(name)
        if fault == "loses_answer":
            raise SandboxError(f"{name}: the connection was cut after the stop")

    async def list(self) -> list[HostRecord]:
        """As the provider below."""
        if self.faults.happens("list_fails"):
            raise SandboxError("the place does not answer")
        return await self.inner.list()

    async def vanish(self, host: str) -> None:
        """The host is destroyed behind the pool's back, with everything on it."""
        self.faults.counts["vanish"] += 1
        await self.inner.stop(host)
        self.faults.cut(host)

    async def dial(self, protocol: asyncio.Protocol, address: str) -> asyncio.Transport:
        """A connection on which the faults of its host act."""
        host = self._names.get(address, "")
        if self.faults.is_cut_off(host):
            raise ConnectionRefusedError(f"{host} is cut off")
        line = FaultyLine(protocol, self.faults, host)
        dial = self.inner.dial if isinstance(self.inner, Dials) else dial_plainly
        await dial(line, address)
        return line.transport()

    async def close(self) -> None:
        """Close the provider below."""
        close = getattr(self.inner, "close", None)
        if close is not None:
            await close()


class FaultyLine(asyncio.Protocol):
    """Stands between a connection and its transport, and does to the bytes what `Faults` says."""

    def __init__(self, protocol: asyncio.Protocol, faults: Faults, host: str) -> None:
        self._protocol = protocol
        self._faults = faults
        self._host = host
        self._real: asyncio.Transport | None = None
        self._outward = _Way(faults, host, self._write, self.cut)
        self._inward = _Way(faults, host, protocol.data_received, self.cut)

    def transport(self) -> asyncio.Transport:
        """What the connection writes to."""
        return cast("asyncio.Transport", _Wrapped(self))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.Protocol."""
        self._real = cast("asyncio.Transport", transport)
        self._faults.add_line(self._host, self)
        self._protocol.connection_made(self.transport())

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol."""
        self._inward.send(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio.Protocol."""
        self._faults.drop_line(self._host, self)
        self._outward.end()
        self._inward.end()
        self._protocol.connection_lost(exc)

    def write(self, data: bytes) -> None:
        """From the connection, towards the host."""
        self._outward.send(bytes(data))

    def _write(self, data: bytes) -> None:
        if self._real is not None and not self._real.is_closing():
            self._real.write(data)

    def release(self) -> None:
        """Deliver what was held back."""
        self._outward.release()
        self._inward.release()

    def cut(self) -> None:
        """End the connection in the middle of what passes."""
        if self._real is not None:
            self._real.abort()

    def close(self) -> None:
        """From the connection: nothing more is sent."""
        if self._real is not None:
            self._real.close()

    def is_closing(self) -> bool:
        """Whether the connection has ended or is about to."""
        return self._real is None or self._real.is_closing()

    def extra(self, name: str, default: Any = None) -> Any:
        """`get_extra_info` of the real transport."""
        return default if self._real is None else self._real.get_extra_info(name, default)


class _Wrapped(asyncio.Transport):
    """The transport that a connection sees."""

    def __init__(self, line: FaultyLine) -> None:
        super().__init__()
        self._line = line

    def write(self, data: Any) -> None:
        self._line.write(data)

    def close(self) -> None:
        self._line.close()

    def abort(self) -> None:
        self._line.cut()

    def is_closing(self) -> bool:
        return self._line.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._line.extra(name, default)


class _Way:
    """One direction of a line."""

    def __init__(self, faults: Faults, host: str, deliver: Callable[[bytes], None], cut: Callable[[], None]) -> None:
        self._faults = faults
        self._host = host
        self._deliver = deliver
        self._cut = cut
        self._held: list[bytes] = []
        self._swapped: bytes | None = None
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._ended = False

    def send(self, data: bytes) -> None:
        faults = self._faults
        if faults.is_frozen(self._host):
            self._held.append(data)
            return
        if faults.happens("cut"):
            faults.counts["cut"] += 1
            self._pass(data[: len(data) // 2])
            self._cut()
            return
        if faults.happens("duplicate"):
            faults.counts["duplicate"] += 1
            self._pass(data)
        if self._swapped is None and faults.happens("reorder"):
            faults.counts["reorder"] += 1
            self._swapped = data
            asyncio.get_running_loop().call_later(0.05, self._unswap)  # in case nothing follows it
            return
        self._pass(data)
        self._unswap()

    def _unswap(self) -> None:
        if self._swapped is not None:
            data, self._swapped = self._swapped, None
            self._pass(data)

    def _pass(self, data: bytes) -> None:
        self._waiting.append((asyncio.get_running_loop().time() + self._faults.delay_s(), data))
        if len(self._waiting) == 1:
            self._hand_over_due()

    def _hand_over_due(self) -> None:
        """One timer at a time: timers of one moment come in any order, and what was sent first must arrive first."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            at_s, data = self._waiting[0]
            if at_s > loop.time():
                loop.call_at(at_s, self._hand_over_due)
                return
            self._waiting.popleft()
            self._hand_over(data)

    def _hand_over(self, data: bytes) -> None:
        if not self._ended and data:
            self._deliver(data)

    def release(self) -> None:
        held, self._held = self._held, []
        for data in held:
            self._hand_over(data)

    def end(self) -> None:
        self._ended = True


@asynccontextmanager
async def faulty_pool(
    config: PoolConfig, rates: Rates | None = None, seed: int = 0
) -> AsyncIterator[tuple[SlotPool, FaultyProvider]]:
    """A started pool of this config whose provider has faults: gives (pool, provider)."""
    options = {"provider": config.provider, "provider_options": dict(config.provider_options), "seed": seed}
    if rates is not None:
        options["rates"] = rates.model_dump()
    changed = config.model_copy(update={"provider": "hermes_rl.testing:FaultyProvider", "provider_options": options})
    provider = FaultyProvider(ProviderContext.of(changed, this_process().tag()), options)
    async with SlotPool(changed, provider) as pool:
        yield pool, provider
