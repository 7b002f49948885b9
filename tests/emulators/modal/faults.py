"""What can be made to go wrong in an RPC, and the rate at which sandboxes may be made."""

from __future__ import annotations

import asyncio
import fnmatch
import random
import time
from dataclasses import dataclass

from grpclib import GRPCError, Status
from modal_proto import api_pb2


def error(status: Status, message: str, retry_after_s: float | None = None) -> GRPCError:
    """A status the SDK turns into its exceptions; with `retry_after_s` it is throttling, and the SDK tries again."""
    details = None if retry_after_s is None else [api_pb2.RPCRetryPolicy(retry_after_secs=retry_after_s)]
    return GRPCError(status, message, details)


@dataclass
class Fault:
    """What befalls the next calls of one RPC. `hits` counts those it befell."""

    rpc: str
    """The name of an RPC, or a pattern as in `Sandbox*`."""
    status: Status | None = None
    message: str = "injected"
    retry_after_s: float | None = None
    lost: bool = False
    """Answer with the status after the work was done: the response was lost."""
    before_s: float = 0.0
    after_s: float = 0.0
    after_bytes: int | None = None
    """Of a stream of output: cut it when so many bytes have been sent."""
    times: int | None = 1
    """None: until it is removed."""
    probability: float = 1.0
    hits: int = 0

    def error(self) -> GRPCError:
        """The answer."""
        assert self.status is not None
        return error(self.status, self.message, self.retry_after_s)


class Befallen:
    """The faults of one call."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults

    async def before(self) -> None:
        """Delays and failures that come before any work."""
        await asyncio.sleep(sum(fault.before_s for fault in self._faults))
        for fault in self._faults:
            if fault.status is not None and not fault.lost and fault.after_bytes is None:
                raise fault.error()

    async def after(self) -> None:
        """Delays and failures that come when the work is done."""
        await asyncio.sleep(sum(fault.after_s for fault in self._faults))
        for fault in self._faults:
            if fault.lost:
                raise fault.error()

    def left_bytes(self, sent_bytes: int) -> int | None:
        """How much of a stream may still be sent before it is cut; None: all."""
        cuts = [fault.after_bytes for fault in self._faults if fault.after_bytes is not None]
        return max(0, min(cuts) - sent_bytes) if cuts else None

    def cut(self) -> GRPCError:
        """What a stream ends with when nothing is left."""
        return next(fault for fault in self._faults if fault.after_bytes is not None).error()


class Faults:
    """Faults to come. Every method gives the `Fault`, so that its hits can be counted and it can be removed."""

    def __init__(self, seed: int = 0) -> None:
        self._faults: tuple[Fault, ...] = ()
        self._random = random.Random(seed)

    def add(self, fault: Fault) -> Fault:
        """Let it befall the RPC from now on."""
        self._faults = (*self._faults, fault)
        return fault

    def fail(self, rpc: str, status: Status = Status.UNAVAILABLE, *, times: int | None = 1, probability: float = 1.0,
             message: str = "injected") -> Fault:  # fmt: skip
        """No work is done."""
        return self.add(Fault(rpc, status, message, times=times, probability=probability))

    def throttle(self, rpc: str, retry_after_s: float, *, times: int | None = 1, probability: float = 1.0) -> Fault:
        """No work is done, and the SDK is told to come again."""
        return self.add(Fault(rpc, Status.RESOURCE_EXHAUSTED, "rate limit (5/s) exceeded", retry_after_s=retry_after_s,
                              times=times, probability=probability))  # fmt: skip

    def lose(self, rpc: str, status: Status = Status.UNAVAILABLE, *, times: int | None = 1,
             probability: float = 1.0) -> Fault:  # fmt: skip
        """The work is done, the response is lost."""
        return self.add(Fault(rpc, status, "lost", lost=True, times=times, probability=probability))

    def delay(self, rpc: str, *, before_s: float = 0.0, after_s: float = 0.0, times: int | None = None,
              probability: float = 1.0) -> Fault:  # fmt: skip
        """Slow on the way to the server, or on the way back."""
        return self.add(Fault(rpc, before_s=before_s, after_s=after_s, times=times, probability=probability))

    def cut_output(self, after_bytes: int, *, times: int | None = 1, probability: float = 1.0) -> Fault:
        """The stream of an exec's output breaks when so many bytes of it have been sent."""
        return self.add(Fault("TaskExecStdioRead", Status.UNAVAILABLE, "cut", after_bytes=after_bytes, times=times,
                              probability=probability))  # fmt: skip

    def remove(self, fault: Fault) -> None:
        """No longer."""
        self._faults = tuple(other for other in self._faults if other is not fault)

    def clear(self) -> None:
        """All is well from now on."""
        self._faults = ()

    def take(self, rpc: str) -> Befallen:
        """Those that befall a call of this RPC which begins now."""
        taken = []
        for fault in self._faults:
            spent = fault.times is not None and fault.hits >= fault.times
            if not spent and fnmatch.fnmatchcase(rpc, fault.rpc) and self._random.random() < fault.probability:
                fault.hits += 1
                taken.append(fault)
        return Befallen(taken)


class TokenBucket:
    """`rate` tokens per second, at most `burst` of them at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst, self._level, self._at = rate, burst, burst, time.monotonic()

    def take(self) -> float:
        """0.0 when a token was taken, else the seconds to wait for one."""
        now = time.monotonic()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        if self._level >= 1:
            self._level -= 1
            return 0.0
        return (1 - self._level) / self._rate


@dataclass
class Limits:
    """What the server grants; any of it may be changed at any time."""

    create_bucket: TokenBucket | None = None
    """Creates beyond it are throttled; a real workspace has `TokenBucket(5, 5)`."""
    max_sandboxes: int | None = None
    create_delay_s: float = 0.0
    """From the moment a sandbox has its name to the moment it runs and its create is answered."""
    image_build_s: float = 0.0
    router_token_s: float = 600.0
    auth_token_s: float = 1200.0
    page_size: int = 100
    """Sandboxes per answer of a list."""
