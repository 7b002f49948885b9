"""The loop: wait for a batch, train, save, hand the new weights to the sampler, report.

A version of the weights is named by its step: "0" is the model as it came. What is saved is always ahead of what is
served, so a trainer that dies at any point resumes with weights that the sampler has had or is about to get.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from environments.apps.reference_trainer.checkpoint import load_checkpoint, save_checkpoint, write_adapter
from environments.apps.reference_trainer.learner import Learner, State
from environments.apps.reference_trainer.llama import load_model
from environments.apps.reference_trainer.rows import read_batch
from environments.apps.reference_trainer.trainer_api import Group, ModelFront, RunApi
from environments.apps.reference_trainer.trainer_settings import TrainerJob


class StopNow(Exception):
    """A stop was asked for while waiting."""


class StopRequest:
    """Whether to stop; `waiting` marks the places where that may be done at once."""

    def __init__(self) -> None:
        self.asked = False
        self._waiting = False

    def on_signals(self) -> None:
        """Ask on SIGTERM and SIGINT. Only the main thread may call this."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def ask(self) -> None:
        """Stop at the next place where nothing is lost."""
        self.asked = True
        if self._waiting:
            self._waiting = False
            raise StopNow

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a stop raises StopNow."""
        self._waiting = True
        try:
            if self.asked:
                raise StopNow
            yield
        finally:
            self._waiting = False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.ask()


POLL_S = 0.1
"""run-api cannot tell when a batch is full: it has to be asked."""

Report = Callable[[dict[str, Any]], None]


class Trainer:
    """One run. `report` gets one dict per event."""

    def __init__(self, job: TrainerJob, report: Report, stop: StopRequest) -> None:
        self._job = job
        self._report = report
        self._stop = stop
        self._api = RunApi(job.run_api_url, job.groups_per_step)
        self._front = ModelFront(job.model_url)
        self._served = 0

    @property
    def adapter(self) -> Path:
        return self._job.run_dir.absolute() / "adapter.gguf"

    def run(self) -> None:
        """Train until `steps` are done or a stop is asked for."""
        job = self._job
        job.run_dir.mkdir(parents=True, exist_ok=True)
        learner = Learner(load_model(job.model, job.first_layer), job)
        state = self._first_state(learner)
        try:
            with self._stop.waiting():
                self._api.register(job.batch_size, job.max_token_len, state.step, job.steps, str(job.run_dir))
            self._report({"event": "ready", "step": state.step, "batch_size": job.batch_size})
            while state.step < job.steps and not self._stop.asked:
                state = self._step(learner, state)
        except StopNow:
            pass
        self._report({"event": "done", "step": state.step, "version_served": self._served, "stopped": self._stop.asked})

    def _first_state(self, learner: Learner) -> State:
        """A new adapter, or the last checkpoint's, which is then also served."""
        state = learner.start()
        saved = load_checkpoint(self._checkpoints, state) if self._job.resume else None
        if saved is None:
            self._write_adapter(state)
            return state
        self._write_adapter(saved)
        with self._stop.waiting():
            self._serve(saved)
        return saved

    def _step(self, learner: Learner, state: State) -> State:
        began = time.monotonic()
        with self._stop.waiting():
            batch = self._next_batch(state)
        taken = time.monotonic()
        self._report({"event": "batch", "step": state.step + 1, "rows": sum(len(group["tokens"]) for group in batch)})
        state, figures = learner.train(state, read_batch(batch, self._job.std_floor))
        trained = time.monotonic()
        self._write_adapter(state)
        save_checkpoint(self._checkpoints, state, self._job.keep_checkpoints)
        with self._stop.waiting():
            self._serve(state)
        times = {"wait_s": taken - began, "train_s": trained - taken, "sync_s": time.monotonic() - trained}
        self._report({"event": "step", **figures.as_dict(), **{name: round(s, 3) for name, s in times.items()}})
        return state

    def _next_batch(self, state: State) -> list[Group]:
        """Wait for a whole batch. With `synchronous` the sampler is paused before the batch leaves the queue, so that
        the groups that the environment starts next wait for the new weights."""
        while True:
            while not self._api.batch_is_there():
                time.sleep(POLL_S)
            if self._job.synchronous:
                self._front.pause()
            if batch := self._api.take():
                return batch
            # There are enough groups, but their sizes do not make up a batch: sampling has to go on.
            if self._job.synchronous:
                self._serve(state)

    def _serve(self, state: State) -> None:
        self._front.load(str(self.adapter), str(state.step))
        self._served = state.step

    def _write_adapter(self, state: State) -> None:
        write_adapter(self.adapter, state.lora, self._job.alpha, self._job.first_layer, str(state.step))

    @property
    def _checkpoints(self) -> Path:
        return self._job.run_dir / "checkpoints"
