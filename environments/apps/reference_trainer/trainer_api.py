"""What the trainer asks over HTTP: run-api for batches, and the front of the model to serve new weights."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

CALL_TIMEOUT_S = 60.0
FRONT_TIMEOUT_S = 3600.0
"""The front answers when rollouts in flight are done, or when the new weights are served, maybe after an evaluation."""

Group = dict[str, Any]


class RequestFailed(RuntimeError):
    """run-api or the front did not answer, or refused; the message says which, and why."""


class RunApi:
    """What a trainer needs of run-api: register once, ask whether there is a batch, take it."""

    def __init__(self, url: str, groups_per_step: int) -> None:
        self._url = url.rstrip("/")
        self._groups_per_step = groups_per_step
        self._taken_until = 0
        self._in_hand: list[Group] | None = None

    def register(self, batch_size: int, max_token_len: int, starting_step: int, steps: int, folder: str) -> None:
        """Say what a batch is. Environments may register only after the first GET /batch, so one is made here."""
        request = {
            "wandb_group": "",
            "wandb_project": "",
            "batch_size": batch_size,
            "max_token_len": max_token_len,
            "checkpoint_dir": folder,
            "save_checkpoint_interval": 1,
            "starting_step": starting_step,
            "num_steps": steps,
        }
        request_json("POST", f"{self._url}/register", request)
        self._taken_until = self._status()["current_step"]
        self._in_hand = self._get_batch()

    def batch_is_there(self) -> bool:
        """Whether `take` would give a batch now; asking does not take one."""
        status = self._status()
        # run-api forms all the batches it can at once and counts them as steps; what was formed is no longer queued.
        formed = status["current_step"] > self._taken_until
        return self._in_hand is not None or formed or status["queue_size"] >= self._groups_per_step

    def take(self) -> list[Group] | None:
        """The next batch, or None when the queue does not fill one."""
        batch, self._in_hand = self._in_hand or self._get_batch(), None
        return batch

    def _get_batch(self) -> list[Group] | None:
        # Without this header run-api compresses the batch at gzip level 9 in its only event loop.
        answer = request_json("GET", f"{self._url}/batch", headers={"Accept-Encoding": "identity"})
        batch: list[Group] | None = answer["batch"]
        if batch:
            self._taken_until += 1
        return batch or None

    def _status(self) -> dict[str, int]:
        status: dict[str, int] = request_json("GET", f"{self._url}/status")
        return status


class ModelFront:
    """The front of the sampling server. Without a url there is none, and nothing is sent."""

    def __init__(self, url: str | None) -> None:
        self._url = url.rstrip("/") if url else None

    def pause(self) -> None:
        """Return when nothing is being sampled; new requests wait."""
        if self._url:
            request_json("POST", f"{self._url}/control/pause", {}, timeout_s=FRONT_TIMEOUT_S)

    def load(self, adapter: str, version: str) -> None:
        """Return when the new weights are served; waiting requests go to them."""
        if self._url:
            body = {"adapter": adapter, "version": version}
            request_json("POST", f"{self._url}/control/weights", body, timeout_s=FRONT_TIMEOUT_S)


def request_json(
    method: str, url: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = CALL_TIMEOUT_S
) -> Any:
    """One JSON request; RequestFailed for anything but a 2xx."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            content = response.read()
    except urllib.error.HTTPError as error:
        text = error.read()[:300].decode("utf-8", "replace")
        raise RequestFailed(f"{method} {url} answered {error.code}: {text}") from error
    except OSError as error:
        raise RequestFailed(f"{method} {url} gave no answer: {error}") from error
    return json.loads(content) if content else None
