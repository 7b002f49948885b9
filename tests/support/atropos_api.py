"""A real run-api on a loopback port, and a small trainer that pulls batches from it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class RunApi:
    """`run-api` as a process that can be killed and started again on the same port."""

    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [str(Path(sys.executable).with_name("run-api")), "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(requests.ConnectionError):
                requests.get(self.url + "/", timeout=5)
                return
            time.sleep(0.05)
        raise TimeoutError("run-api did not come up")

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)
            self.process.wait(10)


@contextlib.contextmanager
def run_api() -> Iterator[RunApi]:
    api = RunApi()
    api.start()
    try:
        yield api
    finally:
        api.kill()


class Trainer:
    """What a trainer does at run-api: register once, then GET /batch."""

    def __init__(self, url: str, batch_size: int = 8, max_token_len: int = 4096, num_steps: int = 100) -> None:
        self.url = url
        self.batches: list[list[dict[str, Any]]] = []
        self._session = requests.Session()
        self._session.headers["Accept-Encoding"] = "identity"
        self._registration = {
            "wandb_group": "g",
            "wandb_project": "p",
            "batch_size": batch_size,
            "max_token_len": max_token_len,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": num_steps,
        }

    def register(self) -> None:
        self._session.post(self.url + "/register", json=self._registration, timeout=30).raise_for_status()
        self.pull()

    def pull(self) -> list[dict[str, Any]] | None:
        batch = self._session.get(self.url + "/batch", timeout=60).json()["batch"]
        if batch:
            self.batches.append(batch)
        return batch

    def pull_until(self, batches: int, timeout_s: float = 60.0, pause_s: float = 0.05) -> list[list[dict[str, Any]]]:
        deadline = time.monotonic() + timeout_s
        while len(self.batches) < batches:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.batches)} of {batches} batches after {timeout_s} s")
            if not self.pull():
                time.sleep(pause_s)
        return self.batches

    def status(self) -> dict[str, Any]:
        return self._session.get(self.url + "/status", timeout=30).json()

    def groups(self) -> list[dict[str, Any]]:
        return [group for batch in self.batches for group in batch]
