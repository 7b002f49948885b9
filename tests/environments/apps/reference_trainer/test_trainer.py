"""The trainer as a process between a real run-api and a front that notes what it is told."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

if find_spec("jax") is None or find_spec("gguf") is None:
    pytest.skip("jax or gguf is not installed (extra learn)", allow_module_level=True)

from environments.apps.learn.plan import REFERENCE_TRAINER
from support.tiny_llama import wire_group, write_tiny_llama

GROUPS, SIZE = 2, 4


class Front:
    """Stands in for the model's front: takes `/control/pause` and `/control/weights`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        noted = self.calls

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                noted.append((self.path, body))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def front() -> Iterator[Front]:
    standing = Front()
    yield standing
    standing.server.shutdown()
    standing.server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


class Process:
    """The trainer's process and its events."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "trainer.json"
        file.write_text(json.dumps(settings, default=str))
        command = [*REFERENCE_TRAINER, str(file)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.events: list[dict[str, Any]] = []

    def until(self, event: str) -> dict[str, Any]:
        """The next event of this name; fails with its stderr when it ends first."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == event:
                return self.events[-1]
        assert self.popen.stderr is not None
        raise AssertionError(f"no {event} among {self.events}: {self.popen.stderr.read()[-2000:]}")

    def end(self) -> int:
        self.popen.communicate(timeout=60)
        return self.popen.returncode

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()


def push(api: Any, seed: int, version: int = 0) -> None:
    """One batch of groups, as an environment sends them."""
    rng = np.random.default_rng(seed)
    for number in range(GROUPS):
        group = wire_group(rng, size=SIZE, turns=2, name=f"g{seed}-{number}", versions=[[f"tiny@{version}"] * 2] * SIZE)
        requests.post(api.url + "/scored_data", json=group, timeout=30).raise_for_status()


@pytest.fixture
def settings(api, front, model, tmp_path):
    return {
        "steps": 2,
        "groups_per_step": GROUPS,
        "group_size": SIZE,
        "first_layer": 1,
        "rank": 2,
        "max_token_len": 200,
        "model": model,
        "run_dir": tmp_path / "run",
        "run_api_url": api.url,
        "model_url": front.url,
        "compilation_cache": tmp_path / "jax",
    }


@pytest.mark.ci
def test_steps_are_served_and_saved_and_a_stop_loses_none(api, front, settings, tmp_path):
    run = tmp_path / "run"
    adapter = str(run / "adapter.gguf")
    with Process(tmp_path, **settings) as trainer:
        assert trainer.until("ready")["batch_size"] == GROUPS * SIZE
        push(api, 1)
        first = trainer.until("step")
        trainer.popen.send_signal(signal.SIGTERM)
        assert trainer.until("done") == {"event": "done", "step": 1, "version_served": 1, "stopped": True}
        assert trainer.end() == 0
    assert front.calls == [("/control/pause", {}), ("/control/weights", {"adapter": adapter, "version": "1"})]
    requests.get(api.url + "/reset_data", timeout=30)
    with Process(tmp_path, **settings, resume=True) as trainer:
        assert trainer.until("ready")["step"] == 1
        assert front.calls[2:] == [("/control/weights", {"adapter": adapter, "version": "1"})]
        push(api, 2, version=1)
        second = trainer.until("step")
        assert trainer.until("done") == {"event": "done", "step": 2, "version_served": 2, "stopped": False}
        assert trainer.end() == 0
    assert front.calls[3:] == [("/control/pause", {}), ("/control/weights", {"adapter": adapter, "version": "2"})]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["last", "step-0001.npz", "step-0002.npz"]
    for number, step in enumerate((first, second), 1):
        assert (step["step"], step["groups"], step["rows"]) == (number, GROUPS, GROUPS * SIZE)
        assert step["staleness_max"] == 0
        assert step["gradient_norm"] > 0
        assert step["logprob_difference_max"] >= step["logprob_difference_mean"] > 0
        assert {"loss", "reward", "tokens_trained", "wait_s", "train_s", "sync_s"} <= step.keys()


def test_wrong_settings_and_a_lost_run_api_are_said_in_one_sentence(front, model, tmp_path):
    settings = {"model": model, "run_dir": tmp_path, "group_size": 4, "max_token_len": 99, "first_layer": 1}
    settings["compilation_cache"] = tmp_path
    settings["run_api_url"] = "http://127.0.0.1:9"
    with Process(tmp_path / "a", **settings, rank=0) as trainer:
        assert "rank: Input should be greater than or equal to 1" in trainer.until("error")["message"]
        assert trainer.end() == 2
    with Process(tmp_path / "b", **settings) as trainer:
        assert "http://127.0.0.1:9/register gave no answer" in trainer.until("error")["message"]
        assert trainer.end() == 1
