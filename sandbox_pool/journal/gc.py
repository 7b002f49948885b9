"""Removes what dead processes left behind: hosts in the journal, and hosts a provider knows, without a living owner.

A dead owner's host is first taken over in the journal (so two collectors never work on the same one), then destroyed
by its provider, and forgotten only when the provider confirmed that nothing is left.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_pool.config import rank
from sandbox_pool.journal.journal import Journal, JournalHost, JournalOwner
from sandbox_pool.journal.owner import Owner, is_alive
from sandbox_pool.providers.base import Closes, HostRecord, Provider, ProviderContext, load_provider

STOP_TIMEOUT_S = 120.0
LIST_TIMEOUT_S = 30.0
INTENT_EXPIRES_S = 3600.0
"""After so long a host that was never seen running is gone: a slot server without a client ends itself in minutes."""
AT_ONCE = 8
"""Hosts destroyed at the same time."""


@dataclass(frozen=True)
class GcAction:
    """What was done with one host."""

    name: str
    provider: str
    done: str
    """destroyed; failed; kept or expired (its place cannot be reached, and it was never seen running)"""
    reason: str

    def text(self) -> str:
        """One line for people."""
        return f"{self.done} {self.name} ({self.provider}): {self.reason}"


@dataclass
class GcReport:
    """What a collection did. `left` counts what should be gone and is not."""

    actions: list[GcAction] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Leftovers that could not be removed."""
        return sum(action.done == "failed" for action in self.actions)


class Liveness:
    """Which owners still run, according to the journal."""

    def __init__(self, owners: dict[str, JournalOwner]) -> None:
        self._owners = owners

    def alive(self, tag: str) -> bool:
        """Whether the owner with this tag still runs; something without a readable tag has no owner."""
        known = self._owners.get(tag)
        try:
            owner = known.owner if known else Owner.parse(tag)
        except ValueError:
            return False
        return is_alive(owner, heartbeat_age_s=time.time() - known.heartbeat_s if known else None)


ProviderPlace = tuple[str, dict[str, Any]]
"""A provider and the settings it was or would be used with."""


def default_place(
    provider: str, scratch_dir: Path | None = None, options: Mapping[str, Any] | None = None
) -> ProviderPlace:
    """A provider with nothing set but, perhaps, its scratch space and options."""
    scratch = None if scratch_dir is None else str(scratch_dir)
    return provider, {"slots": 1, "min_isolation": "plain", "scratch_dir": scratch, "options": dict(options or {})}


def claim_running(
    journal: Journal, me: Owner, *, provider: str, settings: dict[str, Any], spec_key: str, limit: int
) -> list[str]:
    """Take over running hosts of dead owners that were started just as we would start them; their names."""
    live = Liveness(journal.owners())
    wanted = json.loads(json.dumps(settings, default=str))
    names: list[str] = []
    for host in journal.hosts():
        same = (host.provider, host.spec_key, host.settings, host.state) == (provider, spec_key, wanted, "running")
        usable = same and len(names) < limit and not live.alive(host.owner)
        if usable and journal.claim(host.name, dead=host.owner, claimant=me):
            names.append(host.name)
    return names


async def collect_orphans(
    journal: Journal, state_dir: Path, me: Owner, *, places: Iterable[ProviderPlace] = ()
) -> GcReport:
    """Destroy every host without a living owner: those in the journal, and those only their provider knows.

    The given providers and this machine are listed even when the journal does not mention them. A place that cannot be
    reached is told of and keeps no other from being cleaned.
    """
    await asyncio.to_thread(journal.beat, me)
    live = Liveness(await asyncio.to_thread(journal.owners))
    recorded = await asyncio.to_thread(journal.hosts)
    collection = _Collection(journal, state_dir, me, live, {host.name for host in recorded})
    asked = {_key(*place) for place in places}
    by_place: dict[str, tuple[ProviderPlace, list[JournalHost]]] = {}
    here = (default_place("local"),) if sys.platform == "linux" else ()
    for place in (*here, *places):
        by_place[_key(*place)] = place, []
    for host in recorded:
        _, orphans = by_place.setdefault(_key(host.provider, host.settings), ((host.provider, host.settings), []))
        if not live.alive(host.owner):
            orphans.append(host)
    await asyncio.gather(
        *(collection.visit(place, orphans, asked=key in asked) for key, (place, orphans) in by_place.items())
    )
    for tag, owner in (await asyncio.to_thread(journal.owners)).items():
        if tag != me.tag() and not live.alive(owner.owner.tag()):
            await asyncio.to_thread(journal.forget_owner, tag)
    return collection.report


def _key(provider: str, settings: dict[str, Any]) -> str:
    return json.dumps([provider, settings], sort_keys=True, default=str)


class _Collection:
    """One collection over all places."""

    def __init__(self, journal: Journal, state_dir: Path, me: Owner, live: Liveness, known: set[str]) -> None:
        self._journal = journal
        self._state_dir = state_dir
        self._me = me
        self._live = live
        self._known = known
        self._limit = asyncio.Semaphore(AT_ONCE)
        self.report = GcReport()

    async def visit(self, place: ProviderPlace, orphans: list[JournalHost], *, asked: bool) -> None:
        """Clean one place. Nothing is asked of one that does not even list what it has."""
        name, settings = place
        try:
            records = await _list(name, settings, self._state_dir, self._me)
        except Exception as error:  # noqa: BLE001 - one place that cannot be asked must not keep others from being cleaned
            reason = f"{name} cannot be asked what is there: {str(error) or type(error).__name__}"
            if asked or name == "local":
                self._note("*", name, "failed", reason)
            for host in orphans:
                await self._unreachable(host, reason)
            return
        await asyncio.gather(*map(self._destroy_recorded, orphans))
        unknown = [each for each in records if each.name not in self._known and not self._live.alive(each.owner)]
        self._known.update(record.name for record in unknown)
        await asyncio.gather(*(self._destroy_unrecorded(place, record) for record in unknown))

    async def _unreachable(self, host: JournalHost, reason: str) -> None:
        """Keep it on record, unless it never ran as far as anybody knows and would have ended itself by now."""
        if host.address:
            self._note(host.name, host.provider, "failed", reason)
        elif time.time() - host.created_s < INTENT_EXPIRES_S:
            self._note(host.name, host.provider, "kept", f"{reason}; it was never seen running and expires by itself")
        elif await asyncio.to_thread(self._journal.claim, host.name, dead=host.owner, claimant=self._me):
            await asyncio.to_thread(self._journal.forget, host.name)
            self._note(host.name, host.provider, "expired", f"{reason}; it was never seen running")

    async def _destroy_recorded(self, host: JournalHost) -> None:
        if not await asyncio.to_thread(self._journal.claim, host.name, dead=host.owner, claimant=self._me):
            return
        reason = f"its owner (pid {Owner.parse(host.owner).pid}) is dead; it was {host.state}"
        async with self._limit:
            error = await _stop(host.provider, host.settings, self._state_dir, self._me, host.name)
        if error is None:
            await asyncio.to_thread(self._journal.forget, host.name)
        if host.isolation and rank(host.isolation) > 0:
            reason += (
                f"; at the level {host.isolation} a process that hid itself before the host was killed may be left"
            )
        self._note(host.name, host.provider, "failed" if error else "destroyed", error or reason)

    async def _destroy_unrecorded(self, place: ProviderPlace, record: HostRecord) -> None:
        async with self._limit:
            problem = await _stop(*place, self._state_dir, self._me, record.name)
        reason = problem or f"not in the journal, {record.state}, no living owner"
        self._note(record.name, place[0], "failed" if problem else "destroyed", reason)

    def _note(self, name: str, provider: str, done: str, reason: str) -> None:
        self.report.actions.append(GcAction(name, provider, done, reason))


def _load(name: str, settings: dict[str, Any], state_dir: Path, me: Owner) -> Provider:
    context = ProviderContext.from_settings(settings, owner=me.tag(), state_dir=state_dir)
    return load_provider(name, context, settings.get("options") or {})


async def _list(name: str, settings: dict[str, Any], state_dir: Path, me: Owner) -> list[HostRecord]:
    provider = _load(name, settings, state_dir, me)
    try:
        return await asyncio.wait_for(provider.list(), LIST_TIMEOUT_S)
    finally:
        if isinstance(provider, Closes):
            await provider.close()


async def _stop(name: str, settings: dict[str, Any], state_dir: Path, me: Owner, host: str) -> str | None:
    """Destroy one host; the reason when that failed."""
    try:
        provider = _load(name, settings, state_dir, me)
        try:
            await asyncio.wait_for(provider.stop(host), STOP_TIMEOUT_S)
        finally:
            if isinstance(provider, Closes):
                await provider.close()
    except Exception as error:  # noqa: BLE001 - any provider's fault becomes a line of the report and an exit code
        return f"{type(error).__name__}: {error}"
    return None
