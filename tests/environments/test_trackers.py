"""Figures of runs in trackers: which, in what order, and what a broken one does. The real ones: tests/live/trackers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from environments import trackers
from environments.errors import ConfigError
from environments.runs.batch import evaluate_run, process_run
from environments.trackers import Trackers
from support.env_pool import DirectoryPool
from support.env_tasks import NumberEnv, right, standin_model


class Kept:
    """A tracker in memory."""

    entries: list[tuple[str, int, Mapping[str, float]]]
    closed: int
    broken: bool

    def __init__(self, run: str, folder: Path, settings: Mapping[str, Any]) -> None:
        assert folder.name
        assert "group_size" in settings or not settings
        self.run = run

    def log(self, figures: Mapping[str, float], step: int) -> None:
        if Kept.broken:
            raise ConnectionError("nobody listens")
        Kept.entries.append((self.run, step, dict(figures)))

    def close(self) -> None:
        Kept.closed += 1


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    Kept.entries, Kept.closed, Kept.broken = [], 0, False
    monkeypatch.setitem(trackers.TRACKERS, "trackio", Kept)
    monkeypatch.setitem(trackers.NEEDS, "trackio", "json")


@pytest.fixture
def pool() -> Iterator[DirectoryPool]:
    pool = DirectoryPool()
    yield pool
    pool.close()


async def test_process_and_evaluate_track_each_group_and_the_summary(pool: DirectoryPool, tmp_path: Path) -> None:
    async with standin_model(right) as (model, _):
        for run, folder in ((process_run, tmp_path / "p"), (evaluate_run, tmp_path / "e")):
            env = NumberEnv(pool, model, total_steps=3, eval_items=3, groups_at_once=1, trackers=["trackio"])
            assert await run(env, folder) == 0
    for name in ("process", "evaluate"):
        own = [entry for entry in Kept.entries if entry[0] == f"numbers-{name}"]
        assert [step for _, step, _ in own] == [1, 2, 3, 3]
        assert [figures["run/done"] for _, _, figures in own[:3]] == [1.0, 2.0, 3.0]
        assert own[2][2]["run/mean_score"] == own[3][2][f"{name}/mean_score"] == 1.0
    assert Kept.closed == 2


async def test_a_resumed_run_tracks_only_what_is_new(pool: DirectoryPool, tmp_path: Path) -> None:
    async with standin_model(right) as (model, _):
        for steps in (1, 2):
            env = NumberEnv(pool, model, total_steps=steps, groups_at_once=1, trackers=["trackio"])
            assert await process_run(env, tmp_path / "p") == 0
    assert [step for _, step, figures in Kept.entries if "run/done" in figures] == [1, 2]


def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    own = Trackers(["trackio"], "r", tmp_path, {})
    own.log({"a": 1, "b": float("nan"), "c": "text", "d": True, "e": 0.5, "f": None}, 7)
    own.log({"g": "text"}, 8)
    own.close()
    assert Kept.entries == [("r", 7, {"a": 1.0, "e": 0.5})]


def test_a_tracker_that_breaks_is_named_once_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Kept.broken = True
    with caplog.at_level(logging.WARNING):
        own = Trackers(["trackio"], "r", tmp_path, {})
        for step in range(3):
            own.log({"a": 1}, step)
        own.close()
    assert [record.getMessage() for record in caplog.records] == [
        "trackio is left out from here on: ConnectionError: nobody listens"
    ]
    assert Kept.closed == 0


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(trackers.NEEDS, "mlflow", "nosuchmodule")
    with pytest.raises(ConfigError, match=r"nosuchmodule cannot be imported: pip install 'hermes-rl\[mlflow\]'"):
        Trackers(["mlflow"], "r", tmp_path, {})
