"""Hosts on machines: slot servers spread over a list of them by a program of ours that runs on each.

    start   choose the machine with the most room, have the server started there, reach its socket, check who answers
    watch   when the process that leads to a machine ends, so do the connections to its hosts, and they are lost
    stop    have the server ended and its folder removed; raises when the machine cannot be asked
    list    the host folders of every machine that answers

There is one such process per machine (`machine_session.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from sandbox_pool.client.connection import dial
from sandbox_pool.client.host_client import HostClient
from sandbox_pool.errors import HostStartFailed, PlaceUnreachable, SandboxError, SandboxLost
from sandbox_pool.journal.journal import private_state_dir
from sandbox_pool.providers.base import Host, HostRecord, ProviderContext, checked_options, start_error
from sandbox_pool.providers.machines.machine_session import (
    Machine,
    MachineFull,
    MachineOptions,
    MachineRefused,
    MachineUnreachable,
    SessionFolder,
)
from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)

Records = list[HostRecord]


OptionsOfMachines = TypeVar("OptionsOfMachines", bound=MachineOptions)


class MachinesProvider(ABC, Generic[OptionsOfMachines]):
    """Starts slot servers on machines; where those are and how they are reached is for others to say."""

    kind: ClassVar[str]
    options_model: type[OptionsOfMachines]
    adopts = True

    def __init__(self, context: ProviderContext, options: Mapping[str, Any]) -> None:
        self._context = context
        self._options = checked_options(self.options_model, options)
        self._placements = context.state_dir / self.kind
        self._folder: SessionFolder | None = None
        self._machines: dict[str, Machine] = {}

    @abstractmethod
    async def names(self) -> Sequence[str]:
        """The machines that hosts may be started on."""

    @abstractmethod
    def open_machine(self, name: str, folder: SessionFolder) -> Machine:
        """The machine of this name."""

    def own_image(self, spec: SandboxSpec) -> str | None:
        """The image that a host for this spec runs in; None: in none."""
        return None

    async def more(self, machine: Machine, spec: SandboxSpec) -> dict[str, Any]:
        """What a machine must know to start a host for this spec, besides what all must know."""
        return {}

    def everywhere(self) -> dict[str, Any]:
        """What a machine must know to find and stop hosts, besides what all must know."""
        return {}

    def host_key(self, spec: SandboxSpec) -> str:
        """A server builds each slot for the spec of its lease, so every spec can use every host."""
        return self.kind

    async def start(self, name: str, spec: SandboxSpec) -> Host:
        """Start the server on the machine with the most room, or find the one of this name."""
        placed = self._placed(name)
        reasons: list[SandboxError] = []
        for machine in [self._machine(placed)] if placed else await self._by_room():
            # Counted before the first await: hosts that start at the same time go to different machines.
            machine.slots[name] = self._context.slots
            try:
                await machine.connect()
            except MachineUnreachable as error:
                del machine.slots[name]
                reasons.append(error)
                continue
            self._place(name, machine.name)
            try:
                record = await self._start_on(machine, name, spec)
            except MachineUnreachable as error:
                raise HostStartFailed(f"{name}: {error}") from error
            except MachineFull as error:
                del machine.slots[name]
                self._unplace(name)
                reasons.append(error)
                continue
            except MachineRefused as error:
                raise start_error(name, str(error)) from error
            return await self._reached(name, machine, record)
        text = f"{name}: no machine can take it: {'; '.join(map(str, reasons))}"
        # Where one was started before, it may be there still.
        raise HostStartFailed(text) if placed else PlaceUnreachable(text)

    async def stop(self, name: str) -> None:
        """End the server and remove all it left. Raises when something remains or its machine cannot be asked."""
        placed = self._placed(name)
        names = [placed] if placed else await self.names()
        machines = [self._machine(each) for each in names]
        answers = await asyncio.gather(*(self._stop_on(each, name) for each in machines), return_exceptions=True)
        problems = [answer for answer in answers if isinstance(answer, BaseException)]
        if problems:
            raise problems[0]
        self._unplace(name)

    async def list(self) -> Records:
        """The hosts of this user on every machine that answers, whoever started them."""
        machines = [self._machine(each) for each in await self.names()]
        asked = (machine.ask("list", **self._where()) for machine in machines)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        problems = [answer for answer in answers if isinstance(answer, BaseException)]
        for problem in problems:
            if not isinstance(problem, SandboxError) or len(problems) == len(machines):
                raise problem
            log.warning("what is on a machine is not known: %s", problem)
        return [
            HostRecord(each["name"], each["owner"], each["state"], float(each["created_s"]), machine.name)
            for machine, found in zip(machines, answers, strict=True)
            if not isinstance(found, BaseException)
            for each in found
        ]

    async def close(self) -> None:
        """End the connections."""
        await asyncio.gather(*(machine.close() for machine in self._machines.values()))
        self._machines.clear()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    async def _start_on(self, machine: Machine, name: str, spec: SandboxSpec) -> dict[str, Any]:
        context = self._context
        fields = {
            "arguments": [
                *context.server_arguments(name, self._options.level, self.own_image(spec)),
                *machine.server_flags,
            ],
            "listen": machine.listen(),
            **self._where(),
            **await self.more(machine, spec),
        }
        record: dict[str, Any] = await machine.ask(
            "start",
            name=name,
            token=context.token(name),
            owner=context.owner,
            slots=context.slots,
            capacity=machine.capacity,
            scratch_min_mb=context.scratch_min_mb,
            **fields,
        )
        return record

    async def _reached(self, name: str, machine: Machine, record: dict[str, Any]) -> Host:
        """The host at a socket of this machine, once the right one answers there."""
        token = self._context.token(name)
        try:
            address = await machine.reach(name, str(record["address"]))
            client = await HostClient.connect(address, token, dial=dial)
        except (MachineUnreachable, SandboxLost) as error:
            raise HostStartFailed(
                f"{name} runs on {machine.name} but cannot be reached ({error}); {machine.unreached}"
            ) from error
        found = client.info.host_id
        await client.close()
        if found != name:
            raise SandboxLost(f"{machine.name} answers as {found}, not as {name}")
        machine.slots[name] = int(record["slots"])
        return Host(name, address, token, identity=f"{machine.name}:{record['pid']}:{record['ticks']}")

    async def _stop_on(self, machine: Machine, name: str) -> None:
        await machine.ask("stop", name=name, **self._where())
        machine.slots.pop(name, None)
        await machine.unreach(name)

    def _where(self) -> dict[str, Any]:
        scratch = self._context.scratch_dir
        return {"scratch_dir": None if scratch is None else str(scratch), **self.everywhere()}

    def _machine(self, name: str) -> Machine:
        if self._folder is None:
            self._folder = SessionFolder(self.kind)
        if name not in self._machines:
            self._machines[name] = self.open_machine(name, self._folder)
        return self._machines[name]

    async def _by_room(self) -> Sequence[Machine]:
        """Machines in the order to try them: those that answer first, then by how much of each is taken."""
        machines = [self._machine(name) for name in await self.names()]
        return sorted(machines, key=lambda each: (each.down, sum(each.slots.values()) / each.capacity))

    def _placed(self, name: str) -> str | None:
        """The machine on which a host of this name was started, perhaps by an earlier process."""
        with contextlib.suppress(FileNotFoundError):
            return (self._placements / name).read_text()
        return None

    def _place(self, name: str, machine: str) -> None:
        """Written down before the machine is asked: a later process must know where to look."""
        private_state_dir(self._placements)
        (self._placements / name).write_text(machine)

    def _unplace(self, name: str) -> None:
        (self._placements / name).unlink(missing_ok=True)
