"""The slot servers of one machine, started and stopped for a pool elsewhere: `--machine`, over stdin and stdout.

Each line is a request or its answer, as JSON; `id` tells which belong together, and requests run side by side. Servers
outlive this process, which ends when its stdin is closed or nothing came for `SILENCE_S`; with `--machine-and-servers`
it ends them first: for places that kill whatever a session leaves.

    image   have the image that hosts run in, which may take long
    start   make the host's folder and run its server there, or find the one of this name
    stop    end it and remove all it left
    list    every host of this user on this machine

Part of the packed server: standard library, Python 3.9.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from . import apptainer_instances, cleanup
from .host_files import FOLDER, check_private, open_private, remove_tree
from .host_folders import (
    ALIVE,
    INSTANCE,
    OWN_MODE,
    SOCKET_PATH_LIMIT,
    UNFIT,
    candidates,
    file_system_type,
    holds_open,
    is_folder,
    is_running,
    own_name,
    read_record,
    write_new,
    write_record,
)
from .images.layer_store import default_path

GREETING = "hermes-rl machine "
"""Before the facts: what a login shell prints comes earlier."""
SILENCE_S = 90.0
"""A machine that is cut off keeps its session for hours; the pool sends something far more often than this."""
TERM_GRACE_S = 5.0
LOG_TAIL = 2000
PLAIN = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
Request = dict[str, Any]


class Refused(Exception):
    """The machine cannot do it: `kind` says what for a program, the message says why."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def serve(*, keep_servers: bool) -> None:
    """Answer requests until stdin ends."""
    if not keep_servers:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, lambda *_: sys.exit(0))
    started: dict[str, Request] = {}
    try:
        _serve(started)
    finally:
        for request in () if keep_servers else started.values():
            _answer({**request, "op": "stop"})
        # Not a tidy exit: what a thread has begun is found by the next `stop` of that name.
        os._exit(0)


def _serve(started: dict[str, Request]) -> None:
    lock = threading.Lock()
    last: dict[str, threading.Thread] = {}
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def answer(request: Request, earlier: threading.Thread | None) -> None:
            if earlier is not None:
                earlier.join()
            line = json.dumps({"id": request.get("id"), **_answer(request)})
            with lock:
                answers.write(line + "\n")
                answers.flush()

        answers.write(f"{GREETING}{json.dumps(facts())}\n")
        answers.flush()
        signal.setitimer(signal.ITIMER_REAL, SILENCE_S)
        for line in sys.stdin.buffer:
            signal.setitimer(signal.ITIMER_REAL, SILENCE_S)
            request = json.loads(line)
            if request["op"] == "ping":
                continue
            # A stop waits for the start of the same name: else what it confirmed could appear afterwards.
            name = str(request.get("name", request["id"]))
            if request["op"] == "start":
                started[name] = request
            last[name] = threading.Thread(target=answer, args=(request, last.get(name)), daemon=True)
            last[name].start()


def facts() -> dict[str, Any]:
    """What decides how many slots the machine can carry."""
    memory_kb = 0
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        memory_kb = next((int(line.split()[1]) for line in file if line.startswith("MemTotal:")), 0)
    return {"cores": len(os.sched_getaffinity(0)), "memory_mb": memory_kb // 1024, "node": os.uname().nodename}


def _answer(request: Request) -> dict[str, Any]:
    try:
        return {"ok": {"image": image, "start": start, "stop": stop, "list": list_hosts}[request["op"]](request)}
    except Refused as refused:
        return {"kind": refused.kind, "error": str(refused)}
    except apptainer_instances.ContainerFault as fault:
        return {"kind": "container", "error": str(fault)}
    except (OSError, ValueError, KeyError) as error:
        return {"kind": "fault", "error": f"{type(error).__name__}: {error}"}


def image(request: Request) -> str:
    """What instances are started from."""
    return apptainer_instances.image_file(request["container"])


def start(request: Request) -> dict[str, Any]:
    """Start the server of this name, or find the one that runs."""
    for directory in _existing(request):
        record = read_record(directory) or {}
        if is_running(directory, record):
            return record
        stop(request)
    directory, slots = _reserve(request, _root(request))
    scratch = directory / "scratch"
    address = request.get("listen") or f"unix:{scratch / 's'}"
    arguments = ["--slots", str(slots), "--keep-out", str(directory.parent), *request["arguments"]]
    container = request.get("container")
    program = [sys.executable, sys.argv[0]]
    if container:
        store = _layer_store(arguments)
        program = apptainer_instances.enter(container, directory.name, directory, sys.argv[0], store)
        arguments += ["--images", store]
    with (directory / "server.log").open("wb") as log, (directory / ALIVE).open("rb") as alive:
        server = subprocess.Popen(
            [*program, "--scratch", str(scratch), "--listen", address, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=[alive.fileno()],
            env=apptainer_instances.environment() if container else PLAIN,
            cwd="/",
            start_new_session=True,
        )
    threading.Thread(target=server.wait, daemon=True).start()
    said = _first_line(server, str(request["token"]))
    if "error" in said:
        log_text = (directory / "server.log").read_text(errors="replace").strip()[-LOG_TAIL:]
        raise Refused("start", said["error"] or log_text or "the server ended without a message")
    record = {**(read_record(directory) or {}), "pid": server.pid, "ticks": cleanup.start_ticks(server.pid)}
    record["address"] = said.get("address", address)
    write_record(directory, record)
    return record


def _layer_store(arguments: list[str]) -> str:
    """Where layers of images are kept: outside of instances, which have little room and end."""
    path = arguments[arguments.index("--images") + 1] if "--images" in arguments else default_path()
    os.close(open_private(path))
    return path


def _first_line(server: subprocess.Popen[bytes], token: str) -> dict[str, Any]:
    assert server.stdin is not None
    assert server.stdout is not None
    with contextlib.suppress(OSError), server.stdin:  # it ended at once: its log says why
        server.stdin.write(token.encode() + b"\n")
    with server.stdout:
        line = server.stdout.readline()
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    return said if isinstance(said, dict) else {"error": ""}


def _root(request: Request) -> Path:
    """This user's folder in the place that was asked for, else in the first local disk where one can be had."""
    if request.get("scratch_dir"):
        return Path(request["scratch_dir"]) / own_name()
    usable = [path for path in candidates() if path.is_dir() and os.access(path, os.W_OK | os.X_OK)]
    for path in sorted(usable, key=lambda path: file_system_type(path) in UNFIT):
        with contextlib.suppress(OSError):
            check_private(path / own_name())
            return path / own_name()
    raise Refused("scratch", "there is no scratch space on this machine that can be used: set `scratch_dir`")


def _reserve(request: Request, root: Path) -> tuple[Path, int]:
    """The folder of a new host and how many slots it gets; `Refused` when the machine has no room for one more."""
    directory = root / _name(request)
    if len(str(directory / "scratch" / "s")) > SOCKET_PATH_LIMIT:
        raise Refused("start", f"{directory} is too long for a socket in it: set a shorter `scratch_dir`")
    folder = _locked(root)
    try:
        free_mb = shutil.disk_usage(root).free // 2**20
        if free_mb < request["scratch_min_mb"]:
            kept_mb = request["scratch_min_mb"]
            raise Refused("scratch", f"scratch space {root} is full: {free_mb} MB free, {kept_mb} MB are kept")
        used = sum(int((read_record(path) or {}).get("slots", 0)) for path in root.iterdir() if is_folder(path))
        slots = min(int(request["slots"]), int(request["capacity"]) - used)
        if slots < 1:
            raise Refused("full", f"all {request['capacity']} slots of this machine are taken")
        record = {"owner": request["owner"], "slots": slots, "created_s": time.time()}
        _make(folder, directory, {**record, INSTANCE: bool(request.get("container"))})
        return directory, slots
    finally:
        os.close(folder)


def _locked(root: Path) -> int:
    """The open folder, which nobody else can reserve in until it is closed."""
    while True:
        folder = open_private(root, OWN_MODE)
        fcntl.flock(folder, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(folder), root.stat()):
                return folder
        os.close(folder)  # removed meanwhile with the last host in it


def _make(root: int, directory: Path, record: dict[str, Any]) -> None:
    os.mkdir(directory.name, 0o700, dir_fd=root)
    folder = os.open(directory.name, FOLDER, dir_fd=root)
    try:
        os.fchmod(folder, OWN_MODE)
        os.mkdir("scratch", OWN_MODE, dir_fd=folder)
        for name in (ALIVE, "server.log"):
            write_new(folder, name, b"", 0o600)
    finally:
        os.close(folder)
    write_record(directory, record)


def stop(request: Request) -> dict[str, Any]:
    """Make sure that there is no such host and nothing of it left."""
    problems: list[str] = []
    existing = _existing(request)
    for directory in existing:
        _end(directory)
    container = request.get("container")
    if existing and container:
        # Before the folder goes: it is what tells that there may be an instance.
        apptainer_instances.leave(container["program"], _name(request))
    for directory in existing:
        left = cleanup.clean(str(directory / "scratch")) if (directory / "scratch").exists() else []
        # With something left the folder stays: it is how the next stop finds the rest.
        problems += left or remove_tree(directory)
        with contextlib.suppress(OSError):  # others are in it
            directory.parent.rmdir()
    if problems:
        raise Refused("left", "; ".join(problems))
    return {}


def _end(directory: Path) -> None:
    """End whatever has the host's file open: also a server whose start was interrupted before it was recorded."""
    others = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]
    for pid in [pid for pid in others if holds_open(pid, directory / ALIVE)]:
        try:
            # Opened before the process is proven ours: the signal cannot reach another one that gets its number.
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if holds_open(pid, directory / ALIVE):
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(process, number)
                    select.select([process], [], [], TERM_GRACE_S)
        finally:
            os.close(process)


def list_hosts(request: Request) -> list[dict[str, Any]]:
    """Every host folder of this user, whoever started it."""
    found = []
    for directory in sorted(path for root in _roots(request) for path in root.iterdir() if is_folder(path)):
        record = read_record(directory) or {}
        if record.get(INSTANCE, False) != bool(request.get("container")):
            continue
        state = "running" if is_running(directory, record) else ("dead" if "pid" in record else "starting")
        found.append({"created_s": 0.0, "owner": "", **record, "name": directory.name, "state": state})
    return found


def _roots(request: Request) -> list[Path]:
    """This user's folders in every scratch space that may have been chosen; never one that others can change."""
    places = [Path(request["scratch_dir"])] if request.get("scratch_dir") else candidates()
    found = []
    for root in dict.fromkeys(place / own_name() for place in places):
        with contextlib.suppress(OSError):
            if check_private(root):
                found.append(root)
    return found


def _name(request: Request) -> str:
    name = str(request["name"])
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"not a host name: {name!r}")
    return name


def _existing(request: Request) -> list[Path]:
    name = _name(request)
    return [root / name for root in _roots(request) if is_folder(root / name)]
