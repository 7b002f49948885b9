"""Real engines for tests, each with storage and socket of its own: dockerd, podman as root, podman as an ordinary user.

The image of the quick tests has no files but links: the machine's /usr is mounted into its containers. It takes no time
to make and nothing to download.
"""

from __future__ import annotations

import contextlib
import io
import os
import pwd
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.containers import TOOLS, Unavailable, debian_root

START_S = 60
IMAGE = "localhost/hrl-usr:latest"
OPTIONS = {"image": IMAGE, "mounts": ["/usr:/usr:ro"], "pull": "never", "network": "none", "python": "/usr/bin/python3"}
UNPACKED = f"{TOOLS}/docker/usr/sbin:{TOOLS}/docker/usr/bin"
PATH = f"{UNPACKED}:{os.environ['PATH']}:/usr/sbin:/sbin"
BASE_ENVIRONMENT = {key: text for key, text in os.environ.items() if key not in ("CONTAINER_HOST", "DOCKER_HOST")}
APP_IMAGE = "localhost/hrl-own:1"
APP_CHANGES = (
    "ENV GREETING=hi",
    "ENV PATH=/testbed/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "WORKDIR /testbed",
    "USER app:mail",
    'ENTRYPOINT ["/bin/false"]',
)
PODMAN_CONF = """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
"""crun refuses hybrid cgroups, and podman's own limits are above those of some machines."""


@dataclass(frozen=True)
class Engine:
    """An engine that runs: which provider speaks to it, where, and its own command."""

    kind: str
    host: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def options(self, **more: object) -> dict[str, object]:
        """`provider_options` for the quick image."""
        return {"host": self.host, **OPTIONS, **more}

    def run(self, *words: str, **settings: object) -> str:
        """Output of a command of the engine."""
        environment = {**BASE_ENVIRONMENT, "PATH": PATH, **self.environment}
        asked = [*self.command, *words]
        done = subprocess.run(asked, check=True, capture_output=True, text=True, env=environment, **settings)
        return done.stdout.strip()

    def containers(self) -> list[str]:
        """Names of all containers, running or not."""
        return self.run("ps", "--all", "--format", "{{.Names}}").split()

    def volumes(self) -> list[str]:
        """Names of all volumes."""
        return self.run("volume", "ls", "-q").split()


@contextlib.contextmanager
def docker(*flags: str) -> Iterator[Engine]:
    """Dockerd without a bridge or iptables, which need what test machines lack. `flags` are more of its own."""
    if os.geteuid() != 0:
        raise Unavailable("dockerd needs root")
    for program in ("dockerd", "runc"):
        if shutil.which(program, path=PATH) is None:
            raise Unavailable(f"no {program} here: run tests/live/docker/prepare.sh")
    with _folder() as work:
        host = f"unix://{work}/s"
        places = [f"--data-root={work}/data", f"--exec-root={work}/exec", f"--pidfile={work}/pid", "-H", host]
        program = shutil.which("dockerd", path=PATH)
        daemon = [program, "--iptables=false", "--ip6tables=false", "--bridge=none", *places, *flags]
        with _serving(daemon, work, {}):
            command = shutil.which("docker", path=PATH)
            yield _with_image(Engine("docker", host, [command, "-H", host]))


@contextlib.contextmanager
def podman(user: str | None = None) -> Iterator[Engine]:
    """`podman system service` as root, or as another user without privileges."""
    if user and os.geteuid() != 0:
        raise Unavailable("becoming another user needs root")
    if shutil.which("podman") is None or shutil.which("runc", path=PATH) is None:
        raise Unavailable("no podman or no runc here")
    with _folder() as work:
        (work / "containers.conf").write_text(PODMAN_CONF)
        environment = {"CONTAINERS_CONF": str(work / "containers.conf")}
        prefix: list[str] = []
        if user:
            if shutil.which("newuidmap") is None:
                raise Unavailable("no newuidmap here (apt-get install uidmap)")
            environment |= {"HOME": str(work), "XDG_RUNTIME_DIR": str(work / "run")}
            (work / "run").mkdir(mode=0o700)
            for path in (work, work / "run"):
                shutil.chown(path, user)
            # The user has ids of its own only in a mount namespace of the test: nothing of the machine changes.
            (work / "subids").write_text(f"{user}:200000:65536\n")
            mounts = f"mount --bind {work}/subids /etc/subuid && mount --bind {work}/subids /etc/subgid"
            group = pwd.getpwnam(user).pw_gid
            become = f"exec setpriv --reuid={user} --regid={group} --init-groups -- podman"
            prefix = ["unshare", "--mount", "sh", "-c", f'{mounts} && {become} "$@"']
        storage = ["--root", f"{work}/root", "--runroot", f"{work}/run/c", "--storage-driver", "vfs"]
        command = [*prefix, "podman", *storage]  # behind `sh -c`, the first word is only the script's name
        with _serving([*command, "system", "service", "--time=0", f"unix://{work}/s"], work, environment):
            yield _with_image(Engine("podman", f"unix://{work}/s", command, environment))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    # In /tmp: the path of a socket is short. Storage of containers may hold what only the engine can remove.
    with tempfile.TemporaryDirectory(prefix="hrl-e-", dir="/tmp", ignore_cleanup_errors=True) as work:
        Path(work).chmod(0o755)
        yield Path(work)


@contextlib.contextmanager
def _serving(command: list[str], work: Path, environment: dict[str, str]) -> Iterator[None]:
    with (work / "log").open("wb") as log:
        settings = {**BASE_ENVIRONMENT, "PATH": PATH, **environment}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=settings, start_new_session=True, cwd="/")
    try:
        deadline_s = time.monotonic() + START_S
        while not (work / "s").is_socket():
            if process.poll() is not None or time.monotonic() > deadline_s:
                lines = (work / "log").read_text(errors="replace").strip().splitlines() or ["no word"]
                raise Unavailable(f"{Path(command[0]).name} does not start here: {lines[-1][-200:]}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(60)
        with contextlib.suppress(ProcessLookupError):  # podman of an ordinary user starts itself again in a namespace
            os.killpg(process.pid, signal.SIGKILL)


def _with_image(engine: Engine) -> Engine:
    # /sbin is a folder: docker puts its init there.
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
        for name in ("usr", "sbin", "tmp", "run", "root", "etc", "proc", "sys", "dev"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(folder)
        for name in ("passwd", "group", "ld.so.cache"):
            archive.add(f"/etc/{name}", f"etc/{name}")
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        file.write(packed.getvalue())
        file.flush()
        Path(file.name).chmod(0o644)
        try:
            engine.run("import", file.name, IMAGE)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"{engine.kind} imports no image here: {error.stderr.strip()[-200:]}") from error
    return engine


def app_image(engine: Engine) -> str:
    """A Debian with Python, a folder of its own at the top, an environment and a user."""
    root = debian_root()
    if engine.run("images", "--quiet", APP_IMAGE):
        return APP_IMAGE
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        subprocess.run(["tar", "-C", root, "--exclude=./etc/passwd", "-cf", file.name, "."], check=True)
        with tarfile.open(file.name, "a") as archive:
            _add(archive, "testbed", b"", type=tarfile.DIRTYPE, mode=0o755, uid=1234, gid=8)
            _add(archive, "testbed/bin/hello", b"#!/bin/sh\necho hello\n", mode=0o755)
            _add(archive, "testbed/data.txt", b"of the image\n", uid=1234, gid=8)
            _add(archive, "root/.profile-of-image", b"x", mode=0o600)
            users = (root / "etc/passwd").read_bytes() + b"app:x:1234:1234::/testbed:/bin/sh\n"
            _add(archive, "etc/passwd", users)
        Path(file.name).chmod(0o644)
        changes = [word for change in APP_CHANGES for word in ("--change", change)]
        engine.run("import", *changes, file.name, APP_IMAGE)
    return APP_IMAGE


def _add(archive: tarfile.TarFile, name: str, data: bytes, **attributes: object) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    for key, value in attributes.items():
        setattr(entry, key, value)
    archive.addfile(entry, io.BytesIO(data))
