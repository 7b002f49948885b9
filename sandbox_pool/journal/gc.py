"""Removes what dead processes left behind: hosts in the journal, and hosts a provider knows, without a living owner.

A dead owner's host is first taken over in the journal (so two collectors never work on the same one), then destroyed
by its provider, and forgotten only when the provider confirmed that nothing is left.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_pool.journal.journal import Journal, JournalHost, JournalOwner
from sandbox_pool.journal.owner import Owner, is_alive
from sandbox_pool.providers.base import Closes, HostRecord, Provider, ProviderContext, load_provider

STOP_TIMEOUT_S = 120.0
AT_ONCE = 8
"""Hosts destroyed at the same time."""


@dataclass(frozen=True)
class GcAction:
    """What was done with one host."""

    name: str
    provider: str
    done: str
    """destroyed, failed or kept"""
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
    """Destroy every host without a living owner: those in the journal, then those only their provider knows.

    The given providers and this machine are listed even when the journal does not mention them.
    """
    report = GcReport()
    await asyncio.to_thread(journal.beat, me)
    live = Liveness(await asyncio.to_thread(journal.owners))
    recorded = await asyncio.to_thread(journal.hosts)
    limit = asyncio.Semaphore(AT_ONCE)
    orphans = [host for host in recorded if not live.alive(host.owner)]
    await asyncio.gather(*(_destroy_recorded(journal, state_dir, me, host, report, limit) for host in orphans))
    known = {host.name for host in recorded}
    for name, settings in _places(recorded, places):
        await _destroy_unrecorded(name, settings, state_dir, me, live, known, report, limit)
    for tag, owner in (await asyncio.to_thread(journal.owners)).items():
        if tag != me.tag() and not live.alive(owner.owner.tag()):
            await asyncio.to_thread(journal.forget_owner, tag)
    return report


def _places(recorded: list[JournalHost], places: Iterable[ProviderPlace]) -> list[ProviderPlace]:
    """Every provider, with every setting it was used with, once."""
    known = [default_place("local"), *places, *((host.provider, host.settings) for host in recorded)]
    return list(
        {
            json.dumps([name, settings], sort_keys=True, default=str): (name, settings) for name, settings in known
        }.values()
    )


async def _destroy_recorded(
    journal: Journal, state_dir: Path, me: Owner, host: JournalHost, report: GcReport, limit: asyncio.Semaphore
) -> None:
    if not await asyncio.to_thread(journal.claim, host.name, dead=host.owner, claimant=me):
        return
    reason = f"its owner (pid {Owner.parse(host.owner).pid}) is dead; it was {host.state}"
    async with limit:
        error = await _stop(host.provider, host.settings, state_dir, me, host.name)
    if error is None:
        await asyncio.to_thread(journal.forget, host.name)
        report.actions.append(GcAction(host.name, host.provider, "destroyed", reason))
    else:
        report.actions.append(GcAction(host.name, host.provider, "failed", error))


async def _destroy_unrecorded(
    name: str,
    settings: dict[str, Any],
    state_dir: Path,
    me: Owner,
    live: Liveness,
    known: set[str],
    report: GcReport,
    limit: asyncio.Semaphore,
) -> None:
    try:
        records = await _list(name, settings, state_dir, me)
    except Exception as error:  # noqa: BLE001 - one provider that cannot be asked must not keep others from being cleaned
        report.actions.append(GcAction("*", name, "failed", f"cannot be listed: {error}"))
        return
    orphans = [record for record in records if record.name not in known and not live.alive(record.owner)]
    known.update(record.name for record in orphans)

    async def destroy(record: HostRecord) -> None:
        async with limit:
            problem = await _stop(name, settings, state_dir, me, record.name)
        reason = problem or f"not in the journal, {record.state}, no living owner"
        report.actions.append(GcAction(record.name, name, "failed" if problem else "destroyed", reason))

    await asyncio.gather(*map(destroy, orphans))


def _load(name: str, settings: dict[str, Any], state_dir: Path, me: Owner) -> Provider:
    context = ProviderContext.from_settings(settings, owner=me.tag(), state_dir=state_dir)
    return load_provider(name, context, settings.get("options") or {})


async def _list(name: str, settings: dict[str, Any], state_dir: Path, me: Owner) -> list[HostRecord]:
    provider = _load(name, settings, state_dir, me)
    try:
        return await asyncio.wait_for(provider.list(), STOP_TIMEOUT_S)
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
