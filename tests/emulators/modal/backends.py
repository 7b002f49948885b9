"""Where a sandbox's processes run: in namespaces of this machine, or in gVisor inside such namespaces.

Both start as `init.py`, PID 1 of the sandbox, which dies with this emulator and takes every process of it along.
Both answer at `ADDRESS` in the network namespace of that PID 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOOLS_PATH = "/__modal/.bin/modal-sandbox-fs-tools"
ADDRESS, GATEWAY = "172.20.0.2", "172.20.0.1"
"""A tunnel comes from outside: a server that listens on 127.0.0.1 only is not reached."""
NEW_NAMESPACES = ("-m", "-p", "-i", "-u", "-n", "-f")
CLONE_NEWNET = 0x40000000
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RUNSC = HERE.parents[2] / ".tools/runsc/usr/bin"
PREPARE = "tests/live/containers/prepare.sh"
TOLD = 9
RUNSC_FLAGS = ("--platform=systrap", "--network=sandbox", "--ignore-cgroups", "--overlay2=none")
CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
    "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE", "SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE",
)  # fmt: skip


class Unavailable(Exception):
    """This machine cannot run such sandboxes, and why."""


def _found(program: str) -> str:
    path = shutil.which(program, path=f"{os.environ['PATH']}:{SYSTEM_PATH}")
    if path is None:
        raise Unavailable(f"the Modal emulator's sandboxes need {program}")
    return path


@functools.cache
def _try_namespaces() -> None:
    """Root in a container may be without the right."""
    tried = subprocess.run([_found("unshare"), *NEW_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise Unavailable(f"no namespaces for the Modal emulator's sandboxes here: {tried.stderr.strip()}")


class Namespaces:
    """PID, mount, IPC, UTS and network namespaces, and an overlay on this machine's root."""

    def __init__(self, folder: Path, sandbox_id: str) -> None:
        self.id = sandbox_id
        self.folder = folder
        self.pid1: int | None = None
        self.pid_namespace = ""
        self._pidfd: int | None = None

    @staticmethod
    def check() -> None:
        """Raise Unavailable where these sandboxes cannot be had."""
        if os.geteuid() != 0:
            raise Unavailable("the Modal emulator's sandboxes need root")
        for program in ("nsenter", "setpriv", "openssl"):
            _found(program)
        _try_namespaces()

    def launch(self, argv: Sequence[str], env: Mapping[str, str], workdir: str, ready: int) -> list[str]:
        """The command that starts the sandbox and runs `argv` in it; it writes a byte to `ready`."""
        work = self.folder / "work"
        work.mkdir(parents=True)
        settings = {
            "work": str(work), "workdir": workdir, "argv": list(argv), "env": dict(env), "ready": ready, "id": self.id,
            "address": ADDRESS, "gateway": GATEWAY, "tools": str(HERE / "fs_tools.py"), "tools_path": TOOLS_PATH,
            **self._settings(argv, env, workdir),
        }  # fmt: skip
        (self.folder / "settings.json").write_text(json.dumps(settings))
        # A dying emulator takes its sandboxes along by setpriv's signal, and unshare hands it on to PID 1.
        namespaces = ["unshare", *NEW_NAMESPACES, "--kill-child"]
        init = [sys.executable, "-S", "-E", str(HERE / "init.py"), str(self.folder / "settings.json")]
        return ["setpriv", "--pdeathsig", "KILL", *namespaces, *init]

    def _settings(self, argv: Sequence[str], env: Mapping[str, str], workdir: str) -> dict[str, Any]:
        return {}

    def launched(self, launcher: int) -> None:
        """Told the process that runs the launch command, when PID 1 is there."""
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
        self.pid1 = int(children.split()[0])
        self._pidfd = os.pidfd_open(self.pid1)
        self.pid_namespace = str(Path(f"/proc/{self.pid1}/ns/pid").readlink())

    def kill(self) -> None:
        """End PID 1, and so every process of the sandbox; the launch command ends when all of them have."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = None
            # The number of an ended namespace may be that of a new one.
            self.pid_namespace = ""

    def command(self, exec_id: str, argv: Sequence[str], env: Mapping[str, str], workdir: str,
                terminal: bool) -> list[str]:  # fmt: skip
        """The command that runs `argv` inside."""
        go = 'cd "$0" || exit 1; exec "$@"'
        return [*self._enter("-r", "-w"), "/bin/sh", "-c", go, workdir, *argv]

    def _enter(self, *options: str) -> list[str]:
        return [_found("nsenter"), "-t", str(self.pid1), "-m", "-p", "-i", "-u", "-n", *options, "--"]

    def end_command(self, exec_id: str) -> None:
        """End what the process group of the command does not reach."""

    def connect_socket(self) -> socket.socket:
        """A TCP socket in the network namespace from which the sandbox is reached at ADDRESS."""
        made: list[socket.socket] = []

        def make() -> None:
            # A sandbox that has ended has no network.
            with suppress(FileNotFoundError), Path(f"/proc/{self.pid1}/ns/net").open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) == 0:
                    made.append(socket.socket())

        # A thread of its own, since it stays in the namespace it entered.
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if not made:
            raise ConnectionRefusedError(f"no network of sandbox {self.id}")
        made[0].setblocking(False)
        return made[0]


class Gvisor(Namespaces):
    """gVisor's runsc, the kernel Modal's sandboxes have, inside such namespaces."""

    @staticmethod
    def check() -> None:
        """Raise Unavailable where these sandboxes cannot be had."""
        Namespaces.check()
        _found("ip")
        Gvisor._program()

    @staticmethod
    def _program() -> str:
        found = shutil.which("runsc", path=f"{os.environ['PATH']}:{RUNSC}")
        if found is None:
            raise Unavailable(f"no runsc here: run {PREPARE}")
        return found

    def _runsc(self) -> list[str]:
        return [self._program(), "--root", str(self.folder / "work/state"), *RUNSC_FLAGS]

    def _settings(self, argv: Sequence[str], env: Mapping[str, str], workdir: str) -> dict[str, Any]:
        kinds = (("proc", "proc"), ("dev", "tmpfs"), ("sys", "sysfs"), ("tmp", "tmpfs"))
        mounts = [{"destination": f"/{name}", "type": kind, "source": kind} for name, kind in kinds]
        # The first process inside says when it is there, since runsc does not.
        argv = ["/bin/sh", "-c", f'echo >&{TOLD}; exec {TOLD}>&-; exec "$@"', "sh", *argv]
        bundle = {
            "ociVersion": "1.0.0",
            "process": self._process(argv, env, workdir),
            "hostname": "modal",
            "mounts": mounts,
        }
        return {"runsc": self._runsc(), "bundle": bundle, "told": TOLD}

    @staticmethod
    def _process(argv: Sequence[str], env: Mapping[str, str], workdir: str, terminal: bool = False) -> dict[str, Any]:
        capabilities = [f"CAP_{name}" for name in CAPABILITIES]
        return {
            "user": {"uid": 0, "gid": 0},
            "args": list(argv),
            "env": [f"{key}={value}" for key, value in env.items()],
            "cwd": workdir,
            "terminal": terminal,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        }

    def command(self, exec_id: str, argv: Sequence[str], env: Mapping[str, str], workdir: str,
                terminal: bool) -> list[str]:  # fmt: skip
        """The command that runs `argv` inside."""
        process = self.folder / f"{exec_id}.json"
        process.write_text(json.dumps(self._process(argv, env, workdir, terminal)))
        options = ["--process", str(process), "--internal-pid-file", str(self.folder / f"{exec_id}.pid")]
        return [*self._enter(), *self._runsc(), "exec", *options, self.id]

    def end_command(self, exec_id: str) -> None:
        """The client of runsc is not the process: end that inside."""
        pid = self.folder / f"{exec_id}.pid"
        if pid.exists():
            kill = [*self._enter(), *self._runsc(), "kill", "--pid", pid.read_text().strip(), self.id, "KILL"]
            subprocess.run(kill, capture_output=True, check=False)


BACKENDS: dict[str, type[Namespaces]] = {"namespaces": Namespaces, "gvisor": Gvisor}


def processes(*sandboxes: Namespaces) -> list[int]:
    """Processes of these sandboxes, found from outside: by their namespace, and by what their environment says."""
    namespaces = {sandbox.pid_namespace for sandbox in sandboxes}
    marks, found = {f"MODAL_SANDBOX_ID={sandbox.id}".encode() for sandbox in sandboxes}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                inside = str((entry / "ns/pid").readlink()) in namespaces
                if inside or not marks.isdisjoint((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
