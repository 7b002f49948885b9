"""Follows our allocations: by the event stream, and by reading the whole list now and then, because events get lost.

A stream that starts again may have missed events without saying so; therefore the list is read after every start, and
every `relist_s`. Both wake the callers that wait for an allocation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sandbox_pool.providers.nomad.nomad_api import NomadApi, NomadError


def placement_problem(evaluations: Iterable[dict[str, Any]]) -> str:
    """From a job's evaluations; empty while the scheduler has found no fault.

    The status alone does not tell: an evaluation that placed nothing is `complete` and refers to a blocked one.
    """
    newest = sorted(evaluations, key=lambda each: int(each.get("CreateIndex") or 0), reverse=True)
    for evaluation in newest:
        failed = evaluation.get("FailedTGAllocs") or {}
        for metric in failed.values():
            return _sentence(metric)
    return ""


def _sentence(metric: dict[str, Any]) -> str:
    parts = []
    for resource, nodes in sorted((metric.get("DimensionExhausted") or {}).items()):
        parts.append(f"{resource} is exhausted on {_nodes(nodes)}")
    for reason, nodes in sorted((metric.get("ConstraintFiltered") or {}).items()):
        parts.append(f"the constraint `{reason}` leaves out {_nodes(nodes)}")
    for quota in metric.get("QuotaExhausted") or []:
        parts.append(f"the quota {quota} is used up")
    evaluated = int(metric.get("NodesEvaluated") or 0)
    if not parts and not evaluated:
        places = ", ".join(metric.get("NodesAvailable") or {}) or "none"
        parts.append(f"no node is eligible (datacenters with nodes: {places})")
    return "; ".join(parts) or f"none of {_nodes(evaluated)} would do"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


log = logging.getLogger(__name__)

GONE = frozenset({"complete", "failed", "lost", "unknown"})
"""Client statuses after which an allocation is not our host any more. `unknown`: its node is cut off."""
RECONNECT_S = (0.2, 1.0, 3.0)


@dataclass(frozen=True)
class Allocation:
    """The last known state of one allocation."""

    id: str
    job_id: str
    client_status: str
    desired_status: str
    task_running: bool
    detail: str
    """Why it is in that state, in Nomad's words."""
    index: int

    @property
    def running(self) -> bool:
        """Whether its task runs and is meant to."""
        return self.client_status == "running" and self.desired_status == "run" and self.task_running

    @property
    def gone(self) -> bool:
        """Whether it will never serve again, whatever may still run of it."""
        return self.client_status in GONE or self.desired_status != "run"

    @property
    def ended(self) -> bool:
        """Whether its node has ended it, or is cut off and will when it returns."""
        return self.client_status in GONE

    def why(self) -> str:
        """Why it is gone."""
        if self.client_status not in GONE:
            return f"its allocation {self.id[:8]} was told to {self.desired_status}"
        return f"its allocation {self.id[:8]} is {self.client_status}{f' ({self.detail})' if self.detail else ''}"

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Allocation:
        """From any of the forms in which Nomad sends one."""
        states = data.get("TaskStates") or {}
        events = [event for state in states.values() for event in state.get("Events") or []]
        shown = [str(event.get("DisplayMessage") or "") for event in events if event.get("Type") not in ("Received",)]
        detail = data.get("ClientDescription") if data.get("ClientStatus") in ("lost", "unknown") else ""
        return cls(
            id=str(data["ID"]),
            job_id=str(data["JobID"]),
            client_status=str(data.get("ClientStatus")),
            desired_status=str(data.get("DesiredStatus")),
            task_running=bool(states) and all(state.get("State") == "running" for state in states.values()),
            detail=str(detail or "; ".join(text for text in shown[-2:] if text)),
            index=int(data.get("ModifyIndex") or 0),
        )


class AllocationWatch:
    """Follows the allocations of all jobs with a prefix, in the loop that started it."""

    def __init__(self, api: NomadApi, job_prefix: str, relist_s: float, on_gone: Callable[[str, str], None]) -> None:
        self._api = api
        self._prefix = job_prefix
        self._relist_s = relist_s
        self._on_gone = on_gone
        self._known: dict[str, Allocation] = {}
        self._hosts: dict[str, tuple[str, str]] = {}
        """name -> job and allocation that are this host."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow; safe to call again."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    def guard(self, name: str, job_id: str, alloc_id: str) -> None:
        """Only this allocation is the host of this name: report when it is gone."""
        self._hosts[name] = (job_id, alloc_id)
        self._compare()

    def identity(self, name: str) -> str | None:
        """The allocation that a guarded host is."""
        return self._hosts[name][1] if name in self._hosts else None

    def forget(self, name: str) -> None:
        """The host is being stopped: report nothing about it any more."""
        self._hosts.pop(name, None)

    def learn(self, data: dict[str, Any]) -> Allocation:
        """Record one allocation; an older state never replaces a newer one."""
        heard = Allocation.parse(data)
        known = self._known.get(heard.id)
        if known is None or heard.index >= known.index:
            self._known[heard.id] = heard
            if not heard.task_running and known is not None and not data.get("TaskStates"):
                # Some forms leave the tasks out: keep what was known of them.
                self._known[heard.id] = Allocation(**{**vars(heard), "task_running": known.task_running})
        return self._known[heard.id]

    def of_job(self, job_id: str) -> list[Allocation]:
        """What is known of a job's allocations, oldest first."""
        return sorted((each for each in self._known.values() if each.job_id == job_id), key=lambda each: each.index)

    def news(self) -> asyncio.Event:
        """Set at the next change: take it before looking, wait for it after."""
        return self._changed

    async def _follow(self) -> None:
        failures = 0
        while True:
            try:
                async for batch in _with_ticks(self._api.events(["Allocation:*"]), self._relist_s):
                    if batch is None:
                        await self._relist()
                        failures = 0
                    for event in (batch or {}).get("Events") or []:
                        self._event(event)
                    self._wake()
            except NomadError as error:
                failures += 1
                log.log(
                    logging.WARNING if failures == 3 else logging.DEBUG, "allocations cannot be followed: %s", error
                )
                await asyncio.sleep(RECONNECT_S[min(failures, len(RECONNECT_S)) - 1])

    def _event(self, event: dict[str, Any]) -> None:
        data = (event.get("Payload") or {}).get("Allocation") or {}
        if str(data.get("JobID", "")).startswith(self._prefix):
            self.learn(data)

    async def _relist(self) -> None:
        listed = {data["ID"]: self.learn(data) for data in await self._api.allocations(self._prefix)}
        wanted = {alloc_id for _, alloc_id in self._hosts.values()}
        for alloc_id in wanted - set(listed):
            data = await self._api.allocation(alloc_id)
            if data is not None:
                self.learn(data)
            elif alloc_id in self._known:
                # Collected by the cluster, or the cluster lost its state: either way the host is gone.
                self._known[alloc_id] = Allocation(**{**vars(self._known[alloc_id]), "client_status": "lost"})
        for alloc_id in set(self._known) - set(listed) - wanted:
            del self._known[alloc_id]

    def _wake(self) -> None:
        self._compare()
        self._changed.set()
        self._changed = asyncio.Event()

    def _compare(self) -> None:
        """Report every host whose allocation is gone or was replaced."""
        for name, (job_id, alloc_id) in list(self._hosts.items()):
            known = self._known.get(alloc_id)
            others = [each for each in self.of_job(job_id) if each.id != alloc_id]
            reason = known.why() if known is not None and known.gone else ""
            if not reason and others:
                reason = f"Nomad has put allocation {others[-1].id[:8]} in the place of {alloc_id[:8]}"
            if reason:
                del self._hosts[name]
                self._on_gone(name, reason)


async def heard(news: asyncio.Event, timeout_s: float) -> None:
    """Wait for a change, but not longer than this."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await news.wait()


async def _with_ticks(stream: AsyncIterator[dict[str, Any]], interval_s: float) -> AsyncIterator[dict[str, Any] | None]:
    """The stream's batches, with None first and after every interval, when it is time to read the list."""
    due_s = 0.0
    loop = asyncio.get_running_loop()
    try:
        async for batch in stream:
            if loop.time() >= due_s:
                due_s = loop.time() + interval_s
                yield None
            yield batch
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
