"""Real containers for tests: docker and gVisor's runsc, and a provider that starts slot servers in them.

What they need lies below `.tools`, put there by tests/live/containers/prepare.sh. `Unavailable` says in one line why
there is no container here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sandbox_pool.errors import HostStartFailed
from sandbox_pool.providers.base import Host, HostRecord, ProviderContext
from sandbox_pool.server.build.packing import pack
from sandbox_pool.spec import SandboxSpec

TOOLS = Path(__file__).parents[2] / ".tools"
PREPARE = "tests/live/containers/prepare.sh"
IMAGE = "hermes-debian:1"
DAEMON_START_S = 30
DEFAULT_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
    "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE",
)  # fmt: skip
GVISOR_CAPABILITIES = (*DEFAULT_CAPABILITIES, "SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE")


class Unavailable(Exception):
    """This machine has no such container engine, and why."""


def _tool(name: str) -> str:
    if os.geteuid() != 0:
        raise Unavailable("starting containers needs root")
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if path is None:
        raise Unavailable(f"there is no {name} here")
    return path


def debian_root() -> Path:
    """A small Debian with Python."""
    root = TOOLS / "debian-root"
    if not (root / "usr/bin/python3").exists():
        raise Unavailable(f"no Debian for containers here: run {PREPARE}")
    return root


def runsc() -> str:
    """gVisor's runsc: the one on the PATH, else the unpacked one."""
    found = shutil.which("runsc", path=f"{os.environ['PATH']}:{TOOLS}/runsc/usr/bin")
    if found is None:
        raise Unavailable(f"no runsc here: run {PREPARE}")
    return found


@contextlib.contextmanager
def docker_engine() -> Iterator[dict[str, Any]]:
    """A docker engine of our own with the Debian image; gives the options of `ContainerProvider` that use it."""
    daemon, docker, root = _tool("dockerd"), _tool("docker"), debian_root()
    with tempfile.TemporaryDirectory(prefix="hrl-docker-", ignore_cleanup_errors=True) as work:
        host = f"unix://{work}/s"
        places = [f"--data-root={work}/data", f"--exec-root={work}/exec", f"--pidfile={work}/pid"]
        with (Path(work) / "log").open("wb") as log_file:
            process = subprocess.Popen(
                [daemon, "--iptables=false", "--ip6tables=false", "--bridge=none", *places, "-H", host],
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )
        try:
            _await_engine([docker, "-H", host, "version"], process, Path(work) / "log")
            _import_image([docker, "-H", host, "import", "-", IMAGE], root)
            yield {"kind": "docker", "program": [docker, "-H", host]}
        finally:
            process.terminate()
            process.wait(30)


def _await_engine(ask: list[str], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + DAEMON_START_S
    while subprocess.run(ask, capture_output=True, check=False).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline_s:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no word"]
            raise Unavailable(f"dockerd does not start here: {lines[-1][:200]}")
        time.sleep(0.2)


def _import_image(command: list[str], root: Path) -> None:
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as archive:
        done = subprocess.run(command, stdin=archive.stdout, capture_output=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"docker import failed: {done.stderr.decode(errors='replace')[:200]}")


@contextlib.contextmanager
def gvisor() -> Iterator[dict[str, Any]]:
    """runsc with a state directory of its own; gives the options of `ContainerProvider` that use it."""
    if os.geteuid() != 0:
        raise Unavailable("starting containers needs root")
    program, _ = runsc(), debian_root()
    with tempfile.TemporaryDirectory(prefix="hrl-runsc-", ignore_cleanup_errors=True) as work:
        flags = ["--platform=systrap", "--network=none", "--ignore-cgroups", "--host-uds=all", "--overlay2=root:memory"]
        yield {"kind": "runsc", "program": [program, "--root", work, *flags]}


class ContainerProvider:
    """Starts the packed slot server in a container; a directory of the host that is mounted there has its socket.

    Options: `kind` and `program` as the engines above give them, `run` (more options of `docker run`),
    `folder`.
    """

    def __init__(self, context: ProviderContext, options: Mapping[str, Any]) -> None:
        self._context = context
        self._options = options
        self._folder = Path(options["folder"])
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    def host_key(self, spec: SandboxSpec) -> str:
        """The server builds each slot for the spec of its lease, so every spec can use every container."""
        return "container"

    async def start(self, name: str, spec: SandboxSpec) -> Host:
        """A container that ends with our end of its standard input."""
        directory = self._folder / name[-12:]
        directory.mkdir(mode=0o755)
        (directory / "server.pyz").write_bytes(pack())
        server = ["python3", "/hermes/server.pyz", "--scratch", "/var/hermes", "--listen", "unix:/hermes/s"]
        server += ["--slots", str(self._context.slots), "--host-id", name, "--die-with-parent"]
        with (directory / "log").open("wb") as log_file:
            process = await asyncio.create_subprocess_exec(
                *self._command(name, directory, server),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
            )
        self._processes[name] = process
        assert process.stdin is not None
        assert process.stdout is not None
        token = self._context.token(name)
        process.stdin.write(token.encode() + b"\n")
        line = await process.stdout.readline()
        if b'"address"' not in line:
            raise HostStartFailed(f"{name}: {line!r} {(directory / 'log').read_text(errors='replace')[-500:]}")
        return Host(name, f"unix:{directory}/s", token, identity=name)

    def _command(self, name: str, directory: Path, server: list[str]) -> list[str]:
        program = list(self._options["program"])
        if self._options["kind"] == "runsc":
            _write_bundle(directory, server)
            return [*program, "run", "--bundle", str(directory), name]
        mount = f"{directory}:/hermes"
        more = list(self._options.get("run", ()))
        return [*program, "run", "-i", "--rm", "--network=none", "-v", mount, "--name", name, *more, IMAGE, *server]

    async def stop(self, name: str) -> None:
        """End the server by its input, and with it its container."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        if self._options["kind"] == "runsc":
            deleting = [*self._options["program"], "delete", "-force", name]
            await asyncio.to_thread(subprocess.run, deleting, capture_output=True, check=False)

    async def list(self) -> list[HostRecord]:
        """Containers this provider started and has not stopped."""
        return [HostRecord(name, self._context.owner, "running") for name in self._processes]


def _write_bundle(directory: Path, server: list[str]) -> None:
    """An OCI bundle as Modal's kernel would run it: root in gVisor, no network."""
    capabilities = [f"CAP_{name}" for name in GVISOR_CAPABILITIES]
    mounts = [{"destination": f"/{name}", "type": kind, "source": kind} for name, kind in
              (("proc", "proc"), ("dev", "tmpfs"), ("tmp", "tmpfs"))]  # fmt: skip
    binding = {"destination": "/hermes", "type": "bind", "source": str(directory), "options": ["rbind", "rw"]}
    bundle = {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": server,
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        },
        "root": {"path": str(debian_root()), "readonly": False},
        "hostname": "gvisor",
        "mounts": [*mounts, binding],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }
    (directory / "config.json").write_text(json.dumps(bundle))
