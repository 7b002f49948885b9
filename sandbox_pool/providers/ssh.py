"""Hosts on machines that are reached by ssh, all commands and files over one connection per machine.

OpenSSH's own client connects: everything in ~/.ssh/config works (names, jump hosts, agents, hardware keys, known
hosts), and encryption takes no time of this process. Its only session runs our program there; the sockets of hosts are
forwarded through it by its control socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from sandbox_pool.providers.base import Texts
from sandbox_pool.providers.machines.machine_session import Machine, MachineOptions, MachineUnreachable, SessionFolder
from sandbox_pool.providers.machines.machines_provider import MachinesProvider

MASTER = (
    *("-oControlPersist=no", "-oExitOnForwardFailure=no", "-oStreamLocalBindUnlink=yes", "-oClearAllForwardings=yes"),
    *("-oForwardAgent=no", "-oForwardX11=no", "-oPermitLocalCommand=no", "-oRemoteCommand=none", "-oLogLevel=ERROR"),
)
"""Options of the process that connects: nothing of the user's config that would open more than this one session."""


class SshOptions(MachineOptions):
    """`provider_options` of ssh."""

    machines: Texts = Field(min_length=1)
    """What `ssh` is called with: names of ~/.ssh/config, `user@host`, or `ssh://user@host:port`."""
    config: Path | None = None
    """Another file than ~/.ssh/config."""
    identity_file: Path | None = None
    """A key to use besides those of the config and the agent."""
    check_host_keys: Literal["yes", "accept-new"] = "yes"
    """`yes` refuses a machine that known_hosts does not name; `accept-new` adds it on first sight. A changed key is
    always refused."""
    connect_timeout_s: float = Field(default=10.0, gt=0)
    alive_s: float = Field(default=15.0, ge=3)
    """A machine that shows no sign of life for so long is lost, with all hosts on it."""

    @field_validator("machines")
    @classmethod
    def _names(cls, machines: tuple[str, ...]) -> tuple[str, ...]:
        for name in machines:
            if name.startswith("-") or not name.isprintable() or any(character.isspace() for character in name):
                raise ValueError(f"{name!r} is not the name of a machine")
        if len(set(machines)) != len(machines):
            raise ValueError("a machine is named twice")
        return machines


class SshMachine(Machine):
    """A machine behind one ssh process."""

    unreached = "does its sshd allow AllowStreamLocalForwarding?"

    def __init__(self, name: str, options: SshOptions, folder: SessionFolder) -> None:
        super().__init__(name, options, folder)
        self._ssh = options
        self._forwards: dict[str, tuple[Path, str]] = {}

    def command(self, python: list[str]) -> list[str]:
        """One connection, which also takes requests to forward sockets."""
        # One that a killed ssh left would keep this one from taking requests.
        self._folder.file(self.name, "control").unlink(missing_ok=True)
        alive = (f"-oServerAliveInterval={max(1, int(self._ssh.alive_s / 3))}", "-oServerAliveCountMax=3")
        # The interpreter may be several words, `module run python3` for example: for the shell there.
        there = f"exec {python[0]} {shlex.join(python[1:])}"
        return self._command("-T", "-M", *MASTER, *alive, "--", self.name, there)

    async def reach(self, host: str, address: str) -> str:
        """A socket here that leads to the socket there."""
        if host not in self._forwards:
            local, remote = self._folder.new_path(), address.removeprefix("unix:")
            await self._control("forward", f"{local}:{remote}")
            self._forwards[host] = local, remote
        return f"unix:{self._forwards[host][0]}"

    async def unreach(self, host: str) -> None:
        """Close the socket of a host that was stopped."""
        if host in self._forwards:
            local, remote = self._forwards.pop(host)
            with contextlib.suppress(MachineUnreachable):  # closed with the connection
                await self._control("cancel", f"{local}:{remote}")
            local.unlink(missing_ok=True)

    def cut(self) -> None:
        """Sockets that lead nowhere are removed."""
        for local, _ in self._forwards.values():
            local.unlink(missing_ok=True)
        self._forwards.clear()

    async def _control(self, command: str, forward: str) -> None:
        """Ask the running ssh process to open or close a forwarded socket."""
        process = await asyncio.create_subprocess_exec(
            *self._command("-O", command, "-L", forward, "--", self.name),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        if process.returncode:
            raise MachineUnreachable(f"{self.name}: no socket could be led there: {errors.decode().strip()}")

    def _command(self, *arguments: str) -> list[str]:
        options = self._ssh
        command = ["ssh", "-S", str(self._folder.file(self.name, "control")), "-oBatchMode=yes"]
        if options.config is not None:
            command += ["-F", str(options.config)]
        if options.identity_file is not None:
            command += ["-i", str(options.identity_file)]
        command.append(f"-oStrictHostKeyChecking={options.check_host_keys}")
        return [*command, f"-oConnectTimeout={max(1, round(options.connect_timeout_s))}", *arguments]


class SshProvider(MachinesProvider[SshOptions]):
    """Starts slot servers on machines that are reached by ssh."""

    kind: ClassVar = "ssh"
    options_model = SshOptions

    async def names(self) -> Sequence[str]:
        """Those of the options."""
        return self._options.machines

    def open_machine(self, name: str, folder: SessionFolder) -> Machine:
        """A machine that `ssh` knows by this name."""
        return SshMachine(name, self._options, folder)
