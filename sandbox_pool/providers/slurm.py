"""Hosts on the nodes of a Slurm allocation: `srun` leads to each node, in a step that shares what the job has.

    start   choose the node with the most room, have the server started there, connect to it over TCP
    watch   Slurm ends a step with its job, node or srun; with it end the servers, and their hosts are lost
    stop    have the server ended and its folder removed; of a job that has ended nothing runs any more
    list    the host folders of every node of the allocation

Slurm kills what a step leaves behind, so servers live as long as their step: the program on the node ends them and
removes their files when its stdin ends, that is also when the pool was killed. With `image` they run in Apptainer.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sandbox_pool.errors import PlaceUnreachable
from sandbox_pool.providers.apptainer import ImageOptions, have_image
from sandbox_pool.providers.base import ProviderContext, Texts
from sandbox_pool.providers.machines.machine_session import Machine, MachineOptions, SessionFolder
from sandbox_pool.providers.machines.machines_provider import MachinesProvider, Records
from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)

STEP = "hermes-rl"
STEP_FLAGS = ("--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none", "--unbuffered", "--quiet")
"""One program per node, beside whatever else the job runs, with all that the job has there."""


class SlurmOptions(MachineOptions, ImageOptions):
    """`provider_options` of slurm."""

    job: str | None = None
    """The allocation; None: the one this process runs in (SLURM_JOB_ID)."""
    nodes: Texts = ()
    """Use only these of its nodes."""
    srun_flags: Texts = ()
    """More options of `srun`."""


class Node(Machine):
    """One node of the job, and the step on it."""

    keeps_servers = False
    # Slurm signals every process of a step, those of slots as well, in an order of its own.
    server_flags = ("--settle-s", "1")
    end_s = 60.0
    unreached = "may this machine open connections to the nodes?"

    def __init__(self, name: str, options: SlurmOptions, folder: SessionFolder, address: str) -> None:
        super().__init__(name, options, folder)
        self._flags = options.srun_flags
        self._address = address

    def command(self, python: list[str]) -> list[str]:
        """A step of the job, on this node alone."""
        job, _, node = self.name.partition("/")
        where = (f"--jobid={job}", f"--nodelist={node}", f"--job-name={STEP}")
        return ["srun", *where, *STEP_FLAGS, *self._flags, *python]

    def listen(self) -> str:
        """A port of the address at which Slurm itself reaches the node."""
        return f"tcp:{self._address}:0"


class SlurmProvider(MachinesProvider[SlurmOptions]):
    """Starts slot servers on the nodes of an allocation."""

    kind: ClassVar = "slurm"
    options_model = SlurmOptions
    adopts = False

    def __init__(self, context: ProviderContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._job = self._options.job or os.environ.get("SLURM_JOB_ID")
        self._addresses: dict[str, str] = {}
        """Node -> the address at which Slurm reaches it."""

    def settled(self) -> Mapping[str, Any]:
        """Which allocation this is."""
        return {"job": self._job} if self._job else {}

    async def names(self) -> Sequence[str]:
        """The nodes of the job, as JOB/NODE."""
        if self._job is None:
            raise PlaceUnreachable("this is not inside a Slurm allocation: use salloc or sbatch, or set `job`")
        if not self._addresses:
            self._addresses = await self._ask_nodes(self._job)
        return [f"{self._job}/{node}" for node in self._addresses]

    def open_machine(self, name: str, folder: SessionFolder) -> Machine:
        """A node of the job."""
        return Node(name, self._options, folder, self._addresses.get(name.partition("/")[2], "0.0.0.0"))

    def own_image(self, spec: SandboxSpec) -> str | None:
        """The one of the options, which is no image of specs."""
        return self._options.image

    def everywhere(self) -> dict[str, Any]:
        """Instances are ended with the same program."""
        return {"container": self._options.container(None)} if self._options.image else {}

    async def more(self, machine: Machine, spec: SandboxSpec) -> dict[str, Any]:
        """The image, where there is one."""
        return await have_image(machine, self._options, SandboxSpec()) if self._options.image else {}

    async def stop(self, name: str) -> None:
        """As with all machines, but what was on a node of a job that has ended was ended by Slurm."""
        placed = self._placed(name)
        job = placed.partition("/")[0] if placed else self._job
        if job and await self._runs(job):
            await super().stop(name)
        elif placed:
            log.info("%s ended with its job; files of one that was killed go with the next pool on %s", name, placed)
            self._unplace(name)

    async def list(self) -> Records:
        """The hosts on the nodes of the job; on one that has ended there are none."""
        return await super().list() if self._job and await self._runs(self._job) else []

    # All jobs are asked for: about one that it has forgotten, squeue only says that the id is invalid.

    async def _ask_nodes(self, job: str) -> dict[str, str]:
        running = await _output("squeue", "--noheader", "--me", "--states=RUNNING", "--format=%i %N")
        nodes = dict(line.split() for line in running.splitlines()).get(job)
        if nodes is None:
            raise PlaceUnreachable(f"the Slurm job {job} does not run")
        lines = (await _output("scontrol", "--oneliner", "show", "node", nodes)).splitlines()
        facts = [dict(word.partition("=")[::2] for word in line.split() if "=" in word) for line in lines]
        found = {each["NodeName"]: each.get("NodeAddr") or each["NodeName"] for each in facts}
        if unknown := [node for node in self._options.nodes if node not in found]:
            raise PlaceUnreachable(f"{unknown[0]} is not a node of the job {job}, which has {', '.join(found)}")
        return {node: address for node, address in found.items() if node in (self._options.nodes or found)}

    async def _runs(self, job: str) -> bool:
        """Whether anything of the job may still run: a job that ends keeps its nodes until all is killed."""
        states = "--states=RUNNING,COMPLETING,SUSPENDED,STOPPED"
        return job in (await _output("squeue", "--noheader", "--me", states, "--format=%i")).split()


async def _output(*command: str) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise PlaceUnreachable(f"there is no Slurm here: {error}") from error
    out, errors = await process.communicate()
    if process.returncode:
        said = errors.decode("utf-8", "replace").strip()[-300:]
        raise PlaceUnreachable(f"{command[0]} failed: {said or f'exit code {process.returncode}'}")
    return out.decode("utf-8", "replace").strip()
