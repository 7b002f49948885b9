"""Hosts on a Nomad cluster: each one dispatch of a parameterized job, reached on the port that Nomad gave it.

    start   register the job of this version, dispatch one child with the name as idempotency token, wait until its
            allocation runs, send token and slot server to its loader, and check which host answers
    watch   event stream and list; an allocation that is lost, unknown, stopped or replaced is a lost host
    stop    purge the child and wait until its node has ended the task
    list    every job below the prefix, with the owner from its Meta

Commands and files never pass through Nomad: the pool speaks to the slot server directly, so a cluster without a leader
disturbs no lease. Nothing in Nomad is secret: jobs name hashes of tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from sandbox_pool.errors import HostStartFailed, PlaceUnreachable, SandboxError, SandboxLost
from sandbox_pool.images.image_source import is_for_slots
from sandbox_pool.providers.base import Host, HostRecord, ProviderContext
from sandbox_pool.providers.nomad.nomad_agent import have_agent
from sandbox_pool.providers.nomad.nomad_api import Json, NomadApi, NomadError
from sandbox_pool.providers.nomad.nomad_job import META_HOST, META_OWNER, META_TOKEN, PORT, TASK, render_job
from sandbox_pool.providers.nomad.nomad_options import NomadOptions
from sandbox_pool.providers.nomad.nomad_watch import Allocation, AllocationWatch, heard, placement_problem
from sandbox_pool.providers.remote_start import load_server, packed_server, token_hash
from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)

POLL_S = 1.0
"""How long to wait for the event stream before reading the state again."""
STOP_POLL_S = 0.1
LOG_TAIL = 1000
Records = list[HostRecord]
Jobs = list[Json]


class NomadProvider:
    """Starts slot servers on a Nomad cluster."""

    adopts = True

    def __init__(self, context: ProviderContext, options: Mapping[str, Any]) -> None:
        self._context = context
        self._options = NomadOptions.resolve(options)
        self._api = NomadApi(self._options)
        self._tell_lost: Callable[[str, str], None] = lambda name, reason: None
        self._watch: AllocationWatch | None = None
        self._registered: dict[str | None, str] = {}
        self._unanswered: dict[str, str] = {}
        self._asked: set[str] = set()
        """Names under which something may exist."""
        """Hosts whose dispatch may or may not have happened -> the job it was asked of."""
        self._parents: set[str] = set()
        self._starting = asyncio.Lock()
        if self._options.driver != "raw_exec" or self._options.constraints:
            render_job(self._options, context, "", self._options.image or "checked-per-spec")

    def host_key(self, spec: SandboxSpec) -> str:
        """A server builds each slot for the spec of its lease; only a container's image belongs to the host."""
        image = self._image(spec)
        return "nomad" if image is None else hashlib.sha256(image.encode()).hexdigest()[:12]

    def on_host_lost(self, callback: Callable[[str, str], None]) -> None:
        """Part of ReportsLoss."""
        self._tell_lost = callback

    def job(self, spec: SandboxSpec) -> Json:
        """The job of hosts for this spec, as it is registered."""
        return render_job(self._options, self._context, packed_server()[1], self._image(spec))

    async def start(self, name: str, spec: SandboxSpec) -> Host:
        """Dispatch the host, or find the one of this name."""
        if self._options.autostart:
            async with self._starting:
                await have_agent(self._options.address, self._context.state_dir)
        try:
            return await self._start(name, spec)
        except NomadError as error:
            kind = HostStartFailed if name in self._asked else PlaceUnreachable
            raise kind(f"{name}: {error}") from error

    async def _start(self, name: str, spec: SandboxSpec) -> Host:
        watch = self._watching()
        child = await self._child(name)
        if child is None:
            child = await self._dispatch(name, spec)
        self._asked.add(name)
        allocation = await self._running(name, child)
        known = watch.identity(name)
        if known is not None and known != allocation.id:
            raise SandboxLost(f"{name} was allocation {known[:8]} and is {allocation.id[:8]} now")
        host, port = await self._place(name, allocation)
        address, token = f"tcp:{host}:{port}", self._context.token(name)
        try:
            async with asyncio.timeout(self._options.ready_timeout_s):
                await self._unless_gone(name, child, load_server(name, address, token, packed_server()[0]))
        except TimeoutError as error:
            raise HostStartFailed(
                f"{name}: {host}:{port} did not answer in {self._options.ready_timeout_s:g} s after its allocation "
                f"{allocation.id[:8]} was running; can this machine reach the node?"
            ) from error
        watch.guard(name, child, allocation.id)
        return Host(name, address, token, identity=allocation.id)

    async def stop(self, name: str) -> None:
        """Purge the host's job and wait until its node has ended it. Raises when that cannot be confirmed."""
        if self._watch is not None:
            self._watch.forget(name)
        if name in self._unanswered:
            await self._settle(name)
        children = [job["ID"] for job in await self._jobs() if (job.get("Meta") or {}).get(META_HOST) == name]
        for child in children:
            self._parents.add(child.partition("/")[0])
            # Purged at the end only: Nomad forgets the allocations of a purged job at once, ended or not.
            await self._api.deregister(child, purge=False)
            for data in await self._api.allocations_of(child):
                await self._ended(name, str(data["ID"]))
            await self._api.deregister(child, purge=True)

    async def list(self) -> Records:
        """Every host below the job prefix, whoever started it."""
        return [_record(job) for job in await self._jobs() if META_HOST in (job.get("Meta") or {})]

    async def close(self) -> None:
        """Stop following the cluster, and remove jobs without hosts."""
        if self._watch is not None:
            await self._watch.close()
            self._watch = None
        try:
            ids = {str(job["ID"]) for job in await self._jobs()} if self._parents else set()
            for parent in self._parents & ids:
                if not any(each.startswith(f"{parent}/") for each in ids):
                    await self._api.deregister(parent, purge=True)
        except NomadError as error:
            log.info("an unused job may be left at Nomad: %s", error)
        self._registered.clear()
        await self._api.close()

    def _image(self, spec: SandboxSpec) -> str | None:
        """The container image of hosts for this spec; directories, layouts and archives are for its slots."""
        if self._options.driver == "raw_exec":
            return None
        named = spec.image if spec.image and not is_for_slots(spec.image) else None
        return named or self._options.image

    def _watching(self) -> AllocationWatch:
        if self._watch is None:
            self._watch = AllocationWatch(
                self._api, f"{self._options.job_prefix}-", self._options.relist_s, lambda *news: self._tell_lost(*news)
            )
        self._watch.start()
        return self._watch

    async def _jobs(self) -> Jobs:
        return await self._api.jobs(f"{self._options.job_prefix}-")

    async def _child(self, name: str) -> str | None:
        found = [job for job in await self._jobs() if (job.get("Meta") or {}).get(META_HOST) == name]
        return str(found[0]["ID"]) if found else None

    async def _dispatch(self, name: str, spec: SandboxSpec) -> str:
        parent = await self._register(spec)
        self._unanswered[name] = parent
        try:
            answer = await self._ask(name, parent)
        except NomadError as error:
            if error.status != 404:
                self._refused(name, error)
                raise
            # The job was removed, by a person or by another pool that had just closed.
            self._registered.clear()
            answer = await self._ask(name, await self._register(spec))
        del self._unanswered[name]
        return str(answer["DispatchedJobID"])

    async def _ask(self, name: str, parent: str) -> Json:
        self._asked.add(name)
        meta = {META_HOST: name, META_OWNER: self._context.owner, META_TOKEN: token_hash(self._context.token(name))}
        return await self._api.dispatch(parent, name, meta, name)

    def _refused(self, name: str, error: NomadError) -> None:
        if error.status in (400, 403):
            del self._unanswered[name]  # refused: nothing can exist
            self._asked.discard(name)

    async def _settle(self, name: str) -> None:
        """Repeat a dispatch that got no answer, with the same token, so that its job can be found and removed."""
        try:
            await self._ask(name, self._unanswered[name])
        except NomadError as error:
            if error.status != 404:
                raise
        del self._unanswered[name]

    async def _register(self, spec: SandboxSpec) -> str:
        image = self._image(spec)
        if image not in self._registered:
            job = await asyncio.to_thread(self.job, spec)
            await self._api.register(job)
            self._registered[image] = str(job["ID"])
            self._parents.add(str(job["ID"]))
        return self._registered[image]

    async def _running(self, name: str, child: str) -> Allocation:
        """The host's allocation once its task runs; the reason when it will not."""
        began_s = time.monotonic()
        watch = self._watching()
        while True:
            news = watch.news()
            allocations = [watch.learn(data) for data in await self._api.allocations_of(child)]
            if len(allocations) > 1:
                raise SandboxLost(f"{name}: Nomad has replaced its allocation")
            waited_s = time.monotonic() - began_s
            if allocations:
                (allocation,) = allocations
                if allocation.running:
                    return allocation
                if allocation.gone:
                    raise HostStartFailed(f"{name}: {allocation.why()}{await self._stderr_tail(allocation.id)}")
                if waited_s > self._options.pending_timeout_s:
                    raise HostStartFailed(f"{name} is pending for {waited_s:.0f} s: {allocation.detail or 'no reason'}")
            else:
                await self._check_placement(name, child, waited_s)
            await heard(news, POLL_S)

    async def _check_placement(self, name: str, child: str, waited_s: float) -> None:
        problem = placement_problem(await self._api.evaluations(child))
        if waited_s > self._options.blocked_timeout_s:
            raise HostStartFailed(
                f"Nomad has no room for {name} after {waited_s:.0f} s: {problem or 'no reason given'}"
            )
        if problem:
            log.info("%s waits for room: %s", name, problem)

    async def _place(self, name: str, allocation: Allocation) -> tuple[str, int]:
        data = await self._api.allocation(allocation.id) or {}
        ports = ((data.get("AllocatedResources") or {}).get("Shared") or {}).get("Ports") or []
        for port in ports:
            if port["Label"] == PORT:
                return str(port["HostIP"]), int(port["Value"])
        raise HostStartFailed(f"{name}: allocation {allocation.id[:8]} has no port {PORT!r}")

    async def _unless_gone(self, name: str, child: str, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, but stop when the allocation ends meanwhile."""
        watch, task = self._watching(), asyncio.ensure_future(work)
        try:
            while not task.done():
                news = watch.news()
                gone = [each for each in watch.of_job(child) if each.gone]
                if gone:
                    raise HostStartFailed(f"{name}: {gone[-1].why()}{await self._stderr_tail(gone[-1].id)}")
                waking = asyncio.ensure_future(heard(news, POLL_S))
                try:
                    await asyncio.wait({task, waking}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waking.cancel()
            task.result()
        finally:
            task.cancel()

    async def _stderr_tail(self, alloc_id: str) -> str:
        """The end of the task's stderr, if its node still has it."""
        try:
            text = await self._api.log_tail(alloc_id, TASK, "stderr", LOG_TAIL)
        except NomadError:
            return ""
        return f": {text.strip()}" if text.strip() else ""

    async def _ended(self, name: str, alloc_id: str) -> None:
        deadline_s = time.monotonic() + self._options.stop_timeout_s
        while (data := await self._api.allocation(alloc_id)) is not None:
            allocation = Allocation.parse(data)
            if allocation.ended:
                break
            if time.monotonic() > deadline_s:
                raise SandboxError(f"{name}: allocation {alloc_id[:8]} is still {allocation.client_status}")
            await asyncio.sleep(STOP_POLL_S)
        if data is not None and allocation.client_status in ("complete", "failed"):
            try:
                await self._api.collect(alloc_id)
            except NomadError as error:
                log.debug("the files of allocation %s are left to Nomad's own collection: %s", alloc_id, error)


def _record(job: Json) -> HostRecord:
    meta = job["Meta"]
    states = {"pending": "starting", "running": "running"}
    created_s = float(job.get("SubmitTime") or 0) / 1e9
    return HostRecord(
        str(meta[META_HOST]), str(meta.get(META_OWNER, "")), states.get(job["Status"], "dead"), created_s, job["ID"]
    )
