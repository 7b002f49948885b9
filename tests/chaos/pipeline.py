"""The whole pipeline as processes: run-api, model server, `hermes-rl serve` with its slot servers, a trainer's loop."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

from sandbox_pool.journal.journal import Journal
from support.atropos_api import RunApi, Trainer, free_port
from support.env_serve import TESTS, ServedEnv
from support.pool_leftovers import cgroup_name, leftovers

HERE = Path(__file__).parent
SLOTS_DISK_MB = 384
RUN_DISK_MB = 96


class CutLine:
    """A TCP relay in front of a server, whose connections can all be cut at once."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Reset every connection that is open now."""
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(near,), daemon=True).start()

    def _relay(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self._target), 10)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        with self._lock:
            self._open |= {near, far}
        back = threading.Thread(target=_copy, args=(far, near), daemon=True)
        back.start()
        _copy(near, far)
        back.join()
        with self._lock:
            self._open -= {near, far}
        near.close()
        far.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class Program:
    """A process that is started again when it has ended."""

    def __init__(self, name: str, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self.name = name
        self._start = start
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def ensure(self) -> None:
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
            self.starts += 1

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(30)


class Consumer(threading.Thread):
    """The trainer: registers wherever it is not known, takes every batch, and keeps the groups with the time."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.groups: list[tuple[float, dict[str, Any]]] = []
        self.stopped = threading.Event()
        self._url = url

    def run(self) -> None:
        trainer: Trainer | None = None
        while not self.stopped.is_set():
            try:
                if trainer is None:
                    trainer = Trainer(self._url, batch_size=8, max_token_len=16_384, num_steps=1_000_000)
                    trainer.register()
                batch = trainer.pull()
            except (requests.RequestException, ValueError, KeyError):
                trainer = None  # run-api is away, or another one that does not know this trainer
                self.stopped.wait(0.2)
                continue
            now = time.monotonic()
            self.groups += [(now, group) for group in batch or ()]
            if not batch:
                self.stopped.wait(0.1)


class Pipeline:
    """Everything that runs, in one folder. `with Pipeline(folder) as pipeline`."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.slots_disk = folder / "slots"
        self.run_disk = folder / "run"
        self.clock = folder / "clock"
        self.state = folder / "state"
        self._mounted: list[Path] = []
        self._seed = seed
        self.cgroups: set[str] = set()

    def __enter__(self) -> Pipeline:
        for disk, size_mb in ((self.slots_disk, SLOTS_DISK_MB), (self.run_disk, RUN_DISK_MB)):
            disk.mkdir(parents=True)
            if os.geteuid() == 0:  # a disk that can be filled without harm to others
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", disk], check=True)
                self._mounted.append(disk)
        self.clock.write_text("0")
        api, model = RunApi(), free_port()
        self.api_line, self.model_line = CutLine(api.port), CutLine(model)
        self.api = Program("run-api", lambda: _started_api(api))
        self.model = Program("model", lambda: self._started_model(model))
        self.served = ServedEnv(self.run_disk, "chaos", self.api_line.url, self.model_line.url, **self._settings())
        self.env = Program("environment", self._started_env)
        self.programs = (self.api, self.model, self.env)
        for program in self.programs:
            program.ensure()
        self.trainer = Consumer(api.url)
        self.trainer.start()
        return self

    def _settings(self) -> dict[str, Any]:
        return {
            "items": 1_000_000_000,
            "max_num_workers": 4,
            "drain_timeout_s": 30.0,
            "api_wait_s": 120.0,
            "group_deadline_s": 120.0,
            "max_token_length": 16_000,
            "sandbox": {"memory_mb": 128, "pids": 64},
            "limits": {"rollout_timeout_s": 90.0, "turn_timeout_s": 45.0},
            "pool": {
                "provider": "hermes_rl.testing:FaultyProvider",
                "provider_options": {
                    "provider": "local",
                    "seed": self._seed,
                    "rates": {"start_loses_answer": 0.1, "start_fails": 0.1, "stop_fails": 0.05, "cut": 0.0002},
                },
                "slots_per_host": 8,
                "max_hosts": 2,
                "state_dir": str(self.state),
                "scratch_dir": str(self.slots_disk),
                "scratch_min_mb": 16,
                "scratch_warn_mb": 0,
                "health_interval_s": 0.5,
                "health_timeout_s": 2.0,
                "lost_after_s": 8.0,
                # A host that is stopped while it starts looks like a slow one: so long may pass for nothing.
                "start_timeout_s": 25.0,
                "acquire_timeout_s": 60.0,
            },
        }

    def _started_model(self, port: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / "model_server.py"), str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def _started_env(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "environments.apps.cli.main", "serve", str(self.served.path)]
        if self._seed % 2:
            command += ["--workers", "2"]
        environ = os.environ | {"PYTHONPATH": str(TESTS)}
        if (library := self._clock_library()) is not None:
            environ |= {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self.clock)}
        with (self.folder / "environment.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd=self.folder)

    def _clock_library(self) -> Path | None:
        library = self.folder / "clock.so"
        compiler = shutil.which("cc")
        if not library.exists() and compiler is not None:
            source = str(HERE / "clock.c")
            subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), source], check=True)
        return library if library.exists() else None

    def slot_servers(self) -> list[int]:
        """Process ids of the slot servers that run."""
        found = []
        for record in self.slots_disk.glob("hermes-rl-*/*/host.json"):
            self.cgroups.add(cgroup_name(record.parent / "scratch"))
            with contextlib.suppress(OSError, ValueError, KeyError):
                found.append(int(json.loads(record.read_text())["pid"]))
        return sorted(pid for pid in found if Path(f"/proc/{pid}").exists())

    def workers(self) -> list[int]:
        """Process ids of the workers of `serve`, where the seed has any."""
        with contextlib.suppress(OSError, ValueError):
            told = json.loads((self.run_disk / "chaos.status.json").read_text())["facts"].get("workers", ())
            return [worker["pid"] for worker in told if Path(f"/proc/{worker['pid']}").exists()]
        return []

    def restart_what_ended(self) -> None:
        """What a supervisor does."""
        for program in self.programs:
            program.ensure()

    def finish(self) -> dict[str, Any]:
        """End everything in good order; what is left behind, which must be nothing."""
        self.slot_servers()
        self.restart_what_ended()
        self.env.signal(signal.SIGTERM)
        assert self.env.process is not None
        code = self.env.process.wait(120)
        self.trainer.stopped.set()
        self.trainer.join(60)
        command = [sys.executable, "-m", "environments.apps.cli.main", "pool", "gc", "--json"]
        command += ["--state-dir", str(self.state), "--scratch-dir", str(self.slots_disk)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
        left: dict[str, Any] = {}
        if done.returncode != 0:
            left["gc"] = done.stdout + done.stderr
        left |= {k: v for k, v in self._left().items() if v}
        journal = Journal(self.state)
        if journal.hosts() or journal.leases():
            left["journal"] = [*map(str, journal.hosts()), *map(str, journal.leases())]
        journal.close()
        if code not in (0, -signal.SIGTERM, 143):
            left["exit code of serve"] = code
        return left

    def _left(self) -> dict[str, Any]:
        """As `leftovers`, without the disk itself; a killed process gets a moment to be buried."""
        for _ in range(100):
            found = leftovers(self.slots_disk / "hermes-rl-", self.cgroups)
            found["files"] = [str(path) for path in self.slots_disk.rglob("*")]
            if not any(found.values()):
                return {}
            time.sleep(0.1)
        return found

    def __exit__(self, *_: object) -> None:
        self.trainer.stopped.set()
        for program in self.programs:
            program.end()
        self.api_line.close()
        self.model_line.close()
        for disk in self._mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=False)


def _started_api(api: RunApi) -> subprocess.Popen[bytes]:
    api.start()
    assert api.process is not None
    return api.process
