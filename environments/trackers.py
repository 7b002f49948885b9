"""Figures of a run in wandb, TensorBoard, MLflow and trackio: `env.trackers` names them.

Addresses, keys and projects are the trackers' own settings (WANDB_*, MLFLOW_*, TRACKIO_*). All writing happens in a
thread of its own, in order; a tracker that fails is named once and left out: a run does not end because nobody can
watch it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from environments.errors import ConfigError

if TYPE_CHECKING:
    from environments.runs.progress import Progress, Tally

log = logging.getLogger(__name__)

TrackerName = Literal["wandb", "tensorboard", "mlflow", "trackio"]
PROJECT = "hermes-rl"
NEEDS = {"wandb": "wandb", "tensorboard": "tensorboardX", "mlflow": "mlflow", "trackio": "trackio"}
"""Tracker -> the module that it needs; the extra that brings it has the tracker's name."""


class Tracker(Protocol):
    """One place where figures go. Blocking; always called from the same thread."""

    def log(self, figures: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Wandb:
    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        import environments.atropos.wandb_folders  # noqa: F401 - before wandb  # isort: skip
        import wandb

        self._run = wandb.init(project=PROJECT, name=name, dir=folder, config=dict(settings), reinit="create_new")

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoard:
    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("settings", "\n".join(f"    {key}: {value}" for key, value in settings.items()))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for key, value in figures.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Mlflow:
    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        known = self._client.get_experiment_by_name(PROJECT)
        experiment = self._client.create_experiment(PROJECT) if known is None else known.experiment_id
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, str(value)[:500])

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for key, value in figures.items():
            self._client.log_metric(self._run, key.replace("@", "_at_"), value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Trackio:
    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(project=PROJECT, name=name, config=dict(settings), embed=False)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[str, Path, Mapping[str, Any]], Tracker]] = {
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


def check_trackers(names: Sequence[str]) -> None:
    """ConfigError for one whose package is not there."""
    for name in names:
        if importlib.util.find_spec(NEEDS[name]) is None:
            raise ConfigError(f"env.trackers: {NEEDS[name]} cannot be imported: pip install 'hermes-rl[{name}]'")


class Trackers:
    """The trackers of one run."""

    def __init__(self, names: Sequence[str], run: str, folder: Path, settings: Mapping[str, Any]) -> None:
        check_trackers(names)
        self._names = tuple(names)
        self._open: dict[str, Tracker] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trackers") if names else None
        for name in names:
            self._do(name, partial(self._start, name, run, folder, settings))

    def log(self, figures: Mapping[str, Any], step: int) -> None:
        """Hand over what is a number; returns at once."""
        numbers = {key: float(value) for key, value in figures.items() if _is_number(value)}
        for name in self._names if numbers else ():
            self._do(name, partial(self._write, name, numbers, step))

    def close(self) -> None:
        """Write what is left. Blocking."""
        for name in self._names:
            self._do(name, partial(self._end, name))
        if self._thread is not None:
            self._thread.shutdown()
        self._names = ()

    def _start(self, name: str, run: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._open[name] = TRACKERS[name](run, folder, settings)

    def _write(self, name: str, figures: Mapping[str, float], step: int) -> None:
        if name in self._open:
            self._open[name].log(figures, step)

    def _end(self, name: str) -> None:
        if name in self._open:
            self._open.pop(name).close()

    def _do(self, name: str, work: Callable[[], Any]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever a tracker raises: the run goes on without it
                self._open.pop(name, None)
                log.warning("%s is left out from here on: %s: %s", name, type(error).__name__, error)

        assert self._thread is not None
        self._thread.submit(guarded)


@asynccontextmanager
async def tracked(names: Sequence[str], run: str, folder: Path, settings: Mapping[str, Any]) -> AsyncIterator[Trackers]:
    """Trackers that are closed, with everything written, when the run ends in whatever way."""
    trackers = Trackers(names, run, folder, settings)
    try:
        yield trackers
    finally:
        await asyncio.to_thread(trackers.close)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class TrackedProgress:
    """A progress that is tracked as well: one entry for each group that ends."""

    def __init__(self, shown: Progress, trackers: Trackers) -> None:
        self._shown, self._trackers, self._ended = shown, trackers, 0

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, trace)

    def show(self, tally: Tally) -> None:
        self._shown.show(tally)
        ended = tally.done + tally.dropped
        if ended > self._ended and tally.done + tally.dropped > tally.resumed:
            names = ("done", "dropped", "rollouts", "lost", "per_minute")
            figures: dict[str, Any] = {f"run/{name}": getattr(tally, name) for name in names}
            self._trackers.log(figures | {"run/mean_score": tally.mean_score}, ended)
        self._ended = max(self._ended, ended)
