"""One run of `learn`: starts the processes, watches them, evaluates between steps, and stops everything.

The trainer sets the pace: it takes a batch, trains, and hands new weights to the front. Before the front lets requests
through again it calls `_before_open`. There we evaluate, and end a run that has no time left for another step.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import orjson
from pydantic import BaseModel

from agent_loop import own_process
from agent_loop.local_models.cpu_model import UpdatableModel
from agent_loop.local_models.cpu_model.llama_server import free_port
from environments.apps.learn.child_process import Child, run_api_command
from environments.apps.learn.display import Display
from environments.apps.learn.evaluator import (
    Evaluator,
    RolloutTail,
    open_evaluator,
    parse_rate,
    shared_prompt,
    solved_share,
)
from environments.apps.learn.learn_report import verdict, write_report, write_rollouts
from environments.apps.learn.plan import LearnPlan
from environments.apps.learn.run_folder import RunFolder
from environments.atropos.api import until_up
from environments.atropos.stops import Stop
from environments.errors import RunFailed
from environments.runs.status import StatusFile, slot_facts
from environments.runs.store import write_whole
from environments.runs.summary import mean
from environments.trackers import Trackers, tracked

RECENT = 5


class Clock:
    """Time of a run. Earlier starts of a resumed run count in the curves, but not against the limit."""

    def __init__(self, minutes: float | None, earlier_s: float = 0.0) -> None:
        self._began = time.monotonic()
        self._limit_s = None if minutes is None else 60.0 * minutes
        self._earlier_s = earlier_s
        self._steps_s: list[float] = []
        self._evaluation_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return self._earlier_s + time.monotonic() - self._began

    def step_took(self, seconds: float) -> None:
        self._steps_s.append(seconds)

    def evaluation_took(self, seconds: float) -> None:
        self._evaluation_s = seconds

    def another_step_fits(self) -> bool:
        """Whether one more step and the final evaluation would end in time."""
        if self._limit_s is None or not self._steps_s:
            return True
        step_s = statistics.median(self._steps_s[-RECENT:])
        return time.monotonic() - self._began + step_s + self._evaluation_s <= self._limit_s


INTERRUPTED = 130
ENVIRONMENT = "environment"
SERVE_ENDS_FIRST_S = 5.0
"""The environment may end this long before the trainer reports that it has taken the last batch."""


class LearnFailed(RunFailed):
    """A process of the run failed; one sentence says which, and its last message."""


class LearnRun:
    def __init__(self, plan: LearnPlan, display: Display) -> None:
        self._plan, self._display = plan, display
        self._folder = RunFolder(plan.out, resume=plan.resume, fresh=plan.fresh)
        self._front: UpdatableModel | None = None
        self._evaluator: Evaluator | None = None
        self._trainer: Child | None = None
        self._clock = Clock(plan.config.learn.minutes)
        self._tail: RolloutTail | None = None
        self._trackers: Trackers | None = None
        self._fault: asyncio.Future[None] | None = None
        self._opened_at: float | None = None
        self._sampled = {"busy_s": 0.0, "sampled_tokens": 0}
        self._prepared: dict[int, dict[str, Any]] = {}
        self._all_taken = asyncio.Event()
        self._last_step = plan.config.trainer.steps
        self._error = self._doing = ""
        self._evaluated: tuple[int, int] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """The exit code: 0 when all steps are made or the time is up, 130 when interrupted. LearnFailed otherwise."""
        stop = Stop()
        with stop.on_signals(), self._folder, self._display:
            async with StatusFile(self._folder.rollouts, "learn", self.status_facts):
                return await self._until(stop)

    def status_facts(self) -> dict[str, Any]:
        """What goes on right now, for `view --live` and `top`."""
        stats = {"version": None, "train": {}, "eval": {}} if self._front is None else self._front.stats()
        tokens, busy_s = (
            sum(stats[kind].get(key, 0) for kind in ("train", "eval")) for key in ("sampled_tokens", "busy_s")
        )
        return {
            "doing": self._doing,
            "evaluated": self._evaluated,
            "weights": stats["version"],
            "sampled_tokens": tokens,
            "tokens_per_s": tokens / busy_s if busy_s else None,
            **slot_facts(None if self._evaluator is None else self._evaluator.env.pool),
        }

    def _say(self, text: str) -> None:
        self._doing, self._evaluated = text, None
        self._display.say(text)

    def _evaluating(self, done: int, total: int) -> None:
        self._evaluated = (done, total)
        self._display.evaluating(done, total)

    async def _until(self, stop: Stop) -> int:
        work = asyncio.create_task(self._work())
        stopping = asyncio.create_task(stop.draining.wait())
        try:
            await asyncio.wait({work, stopping}, return_when="FIRST_COMPLETED")
            if not work.done():
                self._say("stopping")
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                resume = f"; `--resume` goes on after step {self._folder.saved_step or 0}"
                await self._end(f"Interrupted{resume if self._plan.by == 'reference' else ''}.")
                return INTERRUPTED
            work.result()
            await self._end("")
            return 0
        finally:
            stopping.cancel()

    async def _work(self) -> None:
        plan, folder = self._plan, self._folder
        self._fault = asyncio.get_running_loop().create_future()
        self._tail = RolloutTail(folder.rollouts)
        folder.write_yaml("config.yaml", plan.as_run())
        resumed = plan.resume and folder.saved_step is not None
        if resumed:
            self._clock = Clock(plan.config.learn.minutes, max((e["elapsed_s"] for e in folder.entries), default=0.0))
        async with AsyncExitStack() as stack:
            name = f"{plan.kind.name or plan.config.environment}-learn"
            trackers = tracked(plan.config.env.trackers, name, folder.path, plan.as_run())
            self._trackers = await stack.enter_async_context(trackers)
            self._say("starting llama.cpp and the slots")
            front = self._front = await stack.enter_async_context(
                UpdatableModel(**plan.model_options, paused=True, before_open=self._before_open)
            )
            evaluation_server = plan.server(f"{front.url}/eval", front.model.path)
            self._evaluator = await stack.enter_async_context(open_evaluator(plan.kind, plan.config, evaluation_server))
            if not resumed:  # a resumed trainer hands over its weights first
                await front.open()
            await front.share_prefix(await asyncio.to_thread(shared_prompt, folder.evaluation(0)))
            if plan.by == "trl":
                self._say("starting TRL")
                await self._start_trl(stack, front)
                await self._watch(front, [])
            else:
                self._say("starting run-api, the trainer and the environment")
                await self._watch(front, await self._start_children(stack, front, resumed))

    async def _start_trl(self, stack: AsyncExitStack, front: UpdatableModel) -> None:
        """TRL rolls out by itself."""
        plan, folder, model = self._plan, self._folder, front.model.path
        config = folder.write_yaml("serve.yaml", plan.rollout_config(plan.server(front.url, model), folder.rollouts))
        await self._start_trainer(stack, plan.trl_job(config, front.url, model, folder.path))

    async def _start_trainer(self, stack: AsyncExitStack, job: BaseModel) -> None:
        settings = self._folder.path / "trainer.json"
        write_whole(settings, job.model_dump_json(indent=2).encode())
        command = [*self._plan.trainer, str(settings)]
        trainer = Child("trainer", command, self._folder.log("trainer"), self._on_line)
        self._trainer = await stack.enter_async_context(trainer)

    async def _start_children(self, stack: AsyncExitStack, front: UpdatableModel, resumed: bool) -> list[Child]:
        """The trainer, and what brings it its batches: the environment and run-api."""
        plan, folder = self._plan, self._folder
        port = free_port()
        api_url, model = f"http://127.0.0.1:{port}", front.model.path
        api = await stack.enter_async_context(Child("run-api", run_api_command(port), folder.log("run-api")))
        try:
            await until_up(api_url)
        except TimeoutError as error:
            raise LearnFailed(f"run-api did not start: {api.last_line()}") from error
        await self._start_trainer(stack, plan.trainer_job(api_url, front.url, model, folder.path, resumed))
        config = plan.rollout_config(plan.server(front.url, model), folder.rollouts, api_url)
        serve_config = str(folder.write_yaml("serve.yaml", config))
        command = [sys.executable, "-P", "-m", "environments.apps.cli.main", "serve", serve_config]
        # The first signal lets it finish its rollouts, which may be waiting for new weights; the second ends it.
        signals = (signal.SIGTERM, signal.SIGINT)
        serve = await stack.enter_async_context(Child(ENVIRONMENT, command, folder.log("serve"), signals=signals))
        return [serve, api]

    async def _watch(self, front: UpdatableModel, others_started: Sequence[Child]) -> None:
        """Return when the trainer is done; LearnFailed as soon as a process fails."""
        assert self._fault is not None
        assert self._trainer is not None
        model_lost = asyncio.create_task(front.ended())
        ends = {asyncio.create_task(child.ended()): child for child in (self._trainer, *others_started)}
        others: set[asyncio.Future[Any]] = {model_lost, self._fault}
        try:
            while True:
                await asyncio.wait({*ends, *others}, return_when="FIRST_COMPLETED")
                if self._fault.done():
                    self._fault.result()
                if model_lost.done():
                    raise LearnFailed(
                        f"llama.cpp ended unexpectedly: {model_lost.result()[-300:] or 'it said nothing'}"
                    )
                for task in [task for task in ends if task.done()]:
                    if await self._is_over(ends.pop(task), task.result()):
                        return
        finally:
            for pending in (model_lost, *ends):
                pending.cancel()
            await asyncio.gather(model_lost, *ends, return_exceptions=True)
            if self._ending is not None:
                await self._ending

    async def _is_over(self, child: Child, code: int) -> bool:
        """Whether the run is over: the trainer is done, or was told to stop. The environment may end before it, when
        there is no batch left to make; LearnFailed for every other end."""
        if child is self._trainer and (code == 0 or self._ending is not None):
            return True
        if child.name != ENVIRONMENT or code != 0 or not await self._all_batches_taken():
            raise LearnFailed(self._how_it_ended(child, code))
        return False

    async def _all_batches_taken(self) -> bool:
        try:
            await asyncio.wait_for(self._all_taken.wait(), SERVE_ENDS_FIRST_S)
        except TimeoutError:
            return False
        return True

    def _how_it_ended(self, child: Child, code: int) -> str:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        said = (self._error if child is self._trainer else "") or child.last_line() or "it said nothing"
        return f"the {child.name} {how}: {said} (logs in {self._folder.path / 'logs'})"

    def _on_line(self, line: bytes) -> None:
        """One event of the trainer; what its libraries print is ignored."""
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            return
        match event.get("event") if isinstance(event, dict) else None:
            case "ready":
                self._say(f"the trainer is ready at step {event.get('step', 0)}")
            case "batch":
                self._say(f"training step {event['step']}")
                if event["step"] >= self._plan.config.trainer.steps:
                    self._all_taken.set()
            case "step":
                self._on_step(event)
            case "error":
                self._error = str(event.get("message", ""))

    def _on_step(self, event: dict[str, Any]) -> None:
        step = int(event["step"])
        prepared = self._prepared.pop(step, {})
        evaluated_s = prepared.pop("evaluated_s", 0.0)
        entry = {**event, **prepared, "sync_s": max(0.0, event.get("sync_s", 0.0) - evaluated_s)}
        entry["tools_s"] = max(0.0, event.get("wait_s", 0.0) - entry.get("sampling_s", 0.0))
        self._add(entry)
        if step < self._last_step:
            self._say(f"sampling for step {step + 1}")
        elif step < self._plan.config.trainer.steps and self._ending is None and self._trainer is not None:
            self._say("the time is up")
            self._ending = asyncio.create_task(self._trainer.stop())

    async def _before_open(self, version: str) -> None:
        try:
            await self._on_new_weights(int(version))
        except Exception as error:
            failure = LearnFailed(f"the evaluation after step {version} failed: {error!r}")
            if self._fault is not None and not self._fault.done() and self._trainer is not None:
                self._fault.set_exception(failure)
            raise failure from error
        finally:
            self._opened_at = time.monotonic()

    async def _on_new_weights(self, step: int) -> None:
        """They are served, and nothing is sampled yet: sum up the step, and evaluate when it is due."""
        if self._opened_at is not None:
            self._clock.step_took(time.monotonic() - self._opened_at)
        self._prepared[step] = await self._sampling_figures()
        if step < self._last_step and not self._clock.another_step_fits():
            self._last_step = step
        every = self._plan.config.learn.eval_every
        due = step == 0 or step >= self._last_step or (every > 0 and step % every == 0)
        known = any(entry["event"] == "evaluation" and entry["step"] == step for entry in self._folder.entries)
        if due and not known:
            self._prepared[step]["evaluated_s"] = await self._evaluate(step)

    async def _sampling_figures(self) -> dict[str, Any]:
        """Of what was sampled since the last step."""
        assert self._front is not None
        assert self._tail is not None
        stats = self._front.stats()["train"]
        sampling_s = stats["busy_s"] - self._sampled["busy_s"]
        tokens = stats["sampled_tokens"] - self._sampled["sampled_tokens"]
        self._sampled = stats
        records = await asyncio.to_thread(self._tail.new)
        possible = [record for record in records if record.probe != "impossible"]
        return {
            "success": solved_share(possible),
            "parse_rate": parse_rate(possible),
            "hack_rate": mean([float(bool(record.hack)) for record in records if record.probe]),
            "sampling_s": sampling_s,
            "sampled_tokens": tokens,
            "tokens_per_s": tokens / sampling_s if sampling_s else None,
        }

    async def _evaluate(self, step: int) -> float:
        assert self._evaluator is not None
        self._say(f"evaluating after step {step}")
        entry = await self._evaluator.run(step, self._folder.evaluation(step), self._evaluating)
        self._clock.evaluation_took(entry["duration_s"])
        self._add(entry)
        await self._write_report()
        return float(entry["duration_s"])

    def _add(self, entry: dict[str, Any]) -> None:
        entry = entry | {"elapsed_s": self._clock.elapsed_s}
        self._folder.add(entry)
        self._display.event(entry)
        if self._trackers is not None:
            self._trackers.log(tracked_figures(entry), entry["step"])

    async def _end(self, why: str) -> None:
        self._doing, self._evaluated = "", None
        await asyncio.to_thread(write_rollouts, self._folder.path)
        await self._write_report()
        folder = self._folder
        lines = [why, verdict(folder.entries)]
        if folder.report.exists():
            lines.append(f"curves and examples: {folder.report}")
        if folder.saved_step:
            lines.append(f"use the weights: hermes-rl evaluate --adapter {folder.path / 'adapter.gguf'}")
        if weights := sorted((folder.path / "weights").glob("*.gguf")):
            lines.append(f"use the weights: hermes-rl evaluate learn/smollm2 --openai.options.model {weights[-1]}")
        self._display.end([line for line in lines if line])

    async def _write_report(self) -> None:
        if self._folder.entries:
            await asyncio.to_thread(write_report, self._folder.path, self._folder.report)


def tracked_figures(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl as trackers get it: steps below `learn/`, evaluations below `held_out/`."""
    below = "learn" if entry["event"] == "step" else "held_out"
    kinds = {f"{below}/{kind}/success": own["success"] for kind, own in entry.get("by_kind", {}).items()}
    return {f"{below}/{key}": value for key, value in entry.items() if key != "step"} | kinds


def learn(plan: LearnPlan, display: Display) -> int:
    """Run it; the exit code."""
    # The display and metrics.jsonl say what happens: no log lines between them, but for trackers that break.
    logging.getLogger("environments").setLevel(logging.ERROR)
    logging.getLogger("environments.trackers").setLevel(logging.WARNING)
    return own_process.run(LearnRun(plan, display).run())
