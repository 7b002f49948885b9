"""Kill the environment, run-api and the model server while serving: no wrong sample, none doubled, no leak."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import requests

from agent_loop.local_models.standin import Exchange, StandIn
from sandbox_pool.journal.gc import collect_orphans
from sandbox_pool.journal.journal import Journal
from sandbox_pool.journal.owner import this_process
from support.atropos_api import RunApi, Trainer
from support.env_serve import ServedEnv, play, sampled_by_server, trained_by_trainer


class MortalModel:
    """A stand-in on one port that can be stopped and started; the log goes on."""

    def __init__(self) -> None:
        self._server = StandIn(play)
        self._logs: list[list[Exchange]] = []

    @property
    def url(self) -> str:
        return self._server.url

    async def start(self) -> None:
        self._logs.append(self._server.log)
        await self._server.__aenter__()

    async def stop(self) -> None:
        port = int(self.url.rsplit(":", 1)[1])
        await self._server.__aexit__(None, None, None)
        self._server = StandIn(play, port=port, seed=len(self._logs))

    def log(self) -> list[Exchange]:
        return [exchange for log in self._logs for exchange in log]


class Training:
    """Trainers that pull for ever in a thread, through restarts of run-api."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._trainers: list[Trainer] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._pull)
        self._thread.start()

    def _pull(self) -> None:
        while not self._over.wait(0.05):
            with suppress(requests.RequestException, ValueError, KeyError):
                if not self._trainers or requests.get(self._url + "/info", timeout=10).json()["batch_size"] == -1:
                    self._trainers.append(Trainer(self._url, max_token_len=8193))
                    self._trainers[-1].register()
                self._trainers[-1].pull()

    def groups(self) -> list[dict[str, object]]:
        return [group for trainer in self._trainers for group in trainer.groups()]

    async def more(self, groups: int) -> None:
        """Wait for so many more groups."""
        goal = len(self.groups()) + groups
        async with asyncio.timeout(90):
            while len(self.groups()) < goal:  # noqa: ASYNC110 - the trainers live in a thread
                await asyncio.sleep(0.05)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
async def model() -> AsyncIterator[MortalModel]:
    made = MortalModel()
    await made.start()
    yield made
    await made.stop()


@pytest.mark.ci
@pytest.mark.timeout(240)
async def test_kills_at_random_moments_never_yield_a_wrong_sample_or_a_leak(
    mortal_api: RunApi, model: MortalModel, tmp_path: Path
) -> None:
    rng = random.Random(7)
    training = Training(mortal_api.url)
    env = ServedEnv(tmp_path, "mortal", mortal_api.url, model.url, items=100_000, seconds=0.1, drain_timeout_s=30)
    try:
        env.start()
        await training.more(2)
        await asyncio.sleep(rng.random())
        env.signal(signal.SIGKILL)
        await asyncio.to_thread(env.wait, 10)
        env.start()
        await training.more(2)
        await asyncio.sleep(rng.random())
        mortal_api.kill()
        await asyncio.sleep(rng.random())
        await asyncio.to_thread(mortal_api.start)
        await training.more(2)
        await asyncio.sleep(rng.random())
        await model.stop()
        await asyncio.sleep(1 + rng.random())
        await model.start()
        await training.more(2)
        env.signal(signal.SIGTERM)
        assert await asyncio.to_thread(env.wait, 60) == 0, env.said()[-3000:]
    finally:
        training.stop()
        env.stop()
    wrong = trained_by_trainer(training.groups()) - sampled_by_server(model.log())
    assert not wrong
    await nothing_is_left(tmp_path)


async def nothing_is_left(folder: Path) -> None:
    """After gc no process and no mount names the state directory of this test."""
    journal = Journal(folder / "state")
    report = await collect_orphans(journal, folder / "state", this_process())
    journal.close()
    assert report.left == 0
    assert await asyncio.to_thread(traces_of, str(folder)) == []


def traces_of(text: str) -> list[str]:
    """Mounts and command lines with this text in them."""
    found = [line for line in Path("/proc/self/mounts").read_text().splitlines() if text in line]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (process / "cmdline").read_bytes().decode(errors="replace")
            found += [line] if text in line else []
    return found
