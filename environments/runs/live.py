"""A run while it goes on: what is new in its files, and the page that shows it.

The run writes rollouts.jsonl and status.json (figures.jsonl when it serves, metrics.jsonl when it learns); nothing here
talks to it. The server
listens on the loopback address unless told otherwise, and answers only below a path that holds a random token.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from agent_loop.records.record import RolloutRecord
from environments.atropos.advantages import Baseline
from environments.errors import UsageError
from environments.runs.report.html_page import SCRIPTS, build_page, embedded, find_rollouts
from environments.runs.report.view_model import add_advantages, detail, index_entry
from environments.runs.status import FIGURES_NAME, LEARN_NAME, NAME, beside
from environments.runs.summary import Summary, summarize

LOOK_EVERY_S = 0.5
STALE_S = 10.0
"""A status older than this belongs to a run that is over, or hangs."""
WATCHING_SHARE = 0.1
"""Of one core, at most: the figures of a long run take seconds, and the run goes on beside it."""
RATE_WINDOW_S = 120.0
WINDOW = 50
"""Rollouts whose mean is one point of the curve of a run without steps."""
SLOT_FACTS = ("slots_leased", "slots_free", "slots_resetting", "slots_quarantined", "waiting_for_slots")
CURVES = {
    "held-out success": ("evaluation", "success"),
    "reward": ("step", "reward"),
    "loss": ("step", "loss"),
    "training tasks solved": ("step", "success"),
    "logprob difference": ("step", "logprob_difference_mean"),
    "staleness": ("step", "staleness_mean"),
    "proven hacks": ("step", "hack_rate"),
}
SERVE_CURVES = {
    "evaluation": "eval/mean_score",
    "mean score": "rollouts/verifier_score",
    "reward": "rollouts/score",
    "sampled tokens of a sequence": "train/completion_lengths",
    "proven hacks": "hacks/rate",
}


class LiveRun:
    """What is known of a run; `look` reads what was added since. A file that became shorter is another run."""

    def __init__(self, path: Path, *, max_chars: int = 20_000, baseline: Baseline = "normalized") -> None:
        self.source = find_rollouts(path)
        self._max_chars, self._baseline = max_chars, baseline
        self.runs = 0
        self._start_over()

    def _start_over(self) -> None:
        self.runs += 1
        self.entries: list[dict[str, Any]] = []
        self.light: list[RolloutRecord] = []
        self.status: dict[str, Any] = {}
        self.learning: dict[str, Any] = {}
        self._metrics: list[dict[str, Any]] = []
        self._figures: list[dict[str, Any]] = []
        self._places: list[tuple[int, int]] = []
        self._position = self._metrics_position = self._figures_position = 0
        self._arrived: deque[tuple[float, int]] = deque()
        self._summary: Summary | None = None
        self._state = _state({})
        self.unreadable: list[str] = []

    def look(self) -> bool:
        """Whether anything is new. Blocking."""
        if self.source.exists() and self.source.stat().st_size < self._position:
            self._start_over()
        before, bad_before = len(self.entries), len(self.unreadable)
        self._position = self._read(self.source, self._position, self._take)
        added = self.entries[before:]
        groups = {entry["group"] for entry in added}
        add_advantages([entry for entry in self.entries if entry["group"] in groups], self._baseline)
        self._arrived.append((time.monotonic(), len(added) if self._arrived else 0))  # what was there has no rate
        while self._arrived and self._arrived[0][0] < time.monotonic() - RATE_WINDOW_S:
            self._arrived.popleft()
        positions = self._metrics_position, self._figures_position
        self._metrics_position = self._read_values("metrics.jsonl", positions[0], self._metrics)
        self._figures_position = self._read_values(FIGURES_NAME, positions[1], self._figures)
        lines = (self._metrics_position, self._figures_position) != positions or len(self.unreadable) != bad_before
        told = (_status(beside(self.source, NAME)), _status(beside(self.source, LEARN_NAME)))
        changed = bool(added) or lines or told != (self.status, self.learning)
        self.status, self.learning = told
        state, self._state = self._state, _state(self.learning or self.status)
        return changed or state != self._state

    def _read(self, path: Path, position: int, take: Callable[[int, bytes], None]) -> int:
        """Give each whole line after a position to `take`; where they end. One that cannot be read is counted: the run
        goes on, and so do those who watch."""
        for place, line in _new_lines(path, position):
            position = place + len(line)
            try:
                if line.strip():
                    take(place, line)
            except ValueError as error:
                self.unreadable.append(f"{path}: byte {place}: {error}")
        return position

    def _read_values(self, name: str, position: int, values: list[Any]) -> int:
        return self._read(beside(self.source, name), position, lambda _, line: values.append(orjson.loads(line)))

    def _take(self, place: int, line: bytes) -> None:
        record = RolloutRecord.from_json(line)
        self._places.append((place, len(line)))
        self.entries.append(index_entry(record))
        record.messages, record.tools, record.segments, record.sampled_calls = [], [], [], []
        record.pieces, record.end_state = {}, {}
        self.light.append(record)

    @property
    def summary(self) -> Summary:
        """Of the rollouts that are there: worked out anew only when there are more."""
        if self._summary is None or self._summary.overall.rollouts != len(self.light):
            self._summary = summarize(self.light)
        return self._summary

    def detail(self, number: int) -> dict[str, Any]:
        """One rollout in full, read from the file again. Blocking."""
        place, size = self._places[number]
        with self.source.open("rb") as file:
            file.seek(place)
            record = RolloutRecord.from_json(file.read(size))
        return detail(record, self._max_chars) | {"pieces": record.pieces}

    def facts(self) -> dict[str, str]:
        """What goes on, for people: name -> value."""
        told, learning = self.status.get("facts", {}), self.learning.get("facts", {})
        figures = self.summary.overall
        found: dict[str, str] = {"run": _state(self.learning or self.status)}
        if self.unreadable:
            found["lines that cannot be read"] = f"{len(self.unreadable)}, the first: {self.unreadable[0]}"
        if "doing" in learning:
            found["now"] = learning["doing"] or "-"
            if learning["evaluated"] is not None:
                found["now"] += ": {} of {} tasks".format(*learning["evaluated"])
            found["model"] = f"weights {learning['weights'] or '-'}, {learning['sampled_tokens']:,} tokens sampled"
            if learning["tokens_per_s"]:
                found["model"] += f", {learning['tokens_per_s']:.0f} a second while it samples"
        if "groups" in told:
            done = len({entry["group"] for entry in self.entries})
            found["groups"] = f"{done} of {told['groups']}"
        if "step" in told:
            found["step of the trainer"] = str(told["step"])
        found["rollouts"] = f"{len(self.entries):,}" + self._rate()
        if figures.mean_score is not None:
            error = "" if figures.standard_error is None else f" ± {figures.standard_error:.3f}"
            found["mean score"] = f"{figures.mean_score:.3f}{error}"
        causes = ", ".join(f"{count} {name}" for name, count in figures.losses.by_cause.items())
        found["lost"] = f"{figures.losses.rollouts} ({causes})" if causes else "none"
        if "slots_leased" in told or "slots_leased" in learning:
            slots = {name: told.get(name, 0) + learning.get(name, 0) for name in SLOT_FACTS}
            busy = f"{slots['slots_leased']} leased, {slots['slots_free']} free, {slots['slots_resetting']} resetting"
            found["slots"] = busy + (f", {slots['slots_quarantined']} broken" if slots["slots_quarantined"] else "")
            found["waiting for slots"] = str(slots["waiting_for_slots"])
        if "queue" in told:
            found["queue of run-api"] = f"{told['queue']} groups, {told['unsent']} not sent yet"
            found["groups running"] = str(told["running"])
            found["groups sent"] = str(told["sent"])
            if workers := told.get("workers"):
                ready = sum(worker["ready"] for worker in workers)
                found["workers"] = f"{ready} of {len(workers)}, started again {told['workers_restarted']} times"
            rejected = ", ".join(f"{count} {name}" for name, count in told["rejected"].items())
            found["groups not sent"] = rejected or "none"
        if steps := [entry for entry in self._metrics if entry["event"] == "step"]:
            found["step"] = f"{steps[-1]['step']}, loss {_number(steps[-1].get('loss'))}"
        return found

    def _rate(self) -> str:
        if len(self._arrived) < 2:
            return ""
        seconds = self._arrived[-1][0] - self._arrived[0][0]
        count = sum(number for _, number in list(self._arrived)[1:])
        return f", {60 * count / seconds:.1f} a minute" if seconds > 0 else ""

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Title -> points. A run that learns or serves has steps; of any other the scores of its last rollouts."""
        found = {
            title: [(e["step"], e[key]) for e in self._metrics if e["event"] == event and e.get(key) is not None]
            for title, (event, key) in CURVES.items()
        }
        if not self._metrics:
            for title, name in SERVE_CURVES.items():
                by_step = {line["step"]: line["figures"].get(name) for line in self._figures if name in line["figures"]}
                found[title] = [(step, value) for step, value in by_step.items() if value is not None]
        if self.along == "rollout":
            scores = [e["verifier"] for e in self.entries if e["verifier"] is not None]
            ends = range(WINDOW, len(scores) + 1, max(1, len(scores) // 100))
            found[f"mean score of {WINDOW} rollouts"] = [(e, sum(scores[e - WINDOW : e]) / WINDOW) for e in ends]
        return {title: points for title, points in found.items() if points}

    @property
    def along(self) -> str:
        """What the curves go along."""
        return "step" if self._metrics or self._figures else "rollout"

    def outcomes(self) -> Counter[str]:
        return Counter(entry["outcome"] for entry in self.entries)

    def index(self) -> dict[str, Any]:
        """What the page begins with."""
        return {
            "title": f"{self.source} (live)",
            "baseline": self._baseline,
            "summary": self.summary.to_dict(),
            "rollouts": self.entries,
            "chunks": [],
            "live": self.live(),
        }

    def live(self) -> dict[str, Any]:
        return {"facts": self.facts(), "curves": self.curves(), "along": self.along}

    def news(self, since: int) -> dict[str, Any]:
        """What a page that has so many rollouts lacks."""
        new = self.entries[since:]
        groups = {entry["group"] for entry in new}
        advantages = {
            number: {"advantage": entry["advantage"], "turn_advantages": entry["turn_advantages"]}
            for number, entry in enumerate(self.entries[:since])
            if entry["group"] in groups and "advantage" in entry
        }
        summary = self.summary.to_dict()
        return {"rollouts": new, "advantages": advantages, "summary": summary, "live": self.live()}


def _new_lines(path: Path, position: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines after a position, each with its place."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield position, line
            position += len(line)


def _status(path: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(path.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _state(status: dict[str, Any]) -> str:
    if not status:
        return "no status: the run is over, or has not begun"
    said = f"{status['verb']}, process {status['pid']}"
    if status["ended"]:
        return f"{said}: ended"
    late = time.time() - status["at"]
    if late < STALE_S:
        return f"{said}: running"
    return f"{said}: no word for {f'{late:.0f} s' if late < 60 else f'{late / 60:.0f} min'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


class LiveServer:
    """Serves the page of a run and tells it what is new."""

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self.token = secrets.token_urlsafe(16)
        self._news = asyncio.Condition()
        self._version = 0

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[str]:
        """Listen; the address of the page."""
        app = web.Application(middlewares=[self._only_with_token])
        app.router.add_get("/{token}/", self._page)
        app.router.add_get("/{token}/events", self._events)
        app.router.add_get("/{token}/rollout/{number:\\d+}", self._rollout)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        await asyncio.to_thread(self.run.look)
        watching = asyncio.create_task(self._watch())
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            bound = runner.addresses[0]
            yield f"http://{host}:{bound[1]}/{self.token}/"
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            await runner.cleanup()

    @web.middleware
    async def _only_with_token(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if not secrets.compare_digest(request.match_info.get("token", ""), self.token):
            raise web.HTTPNotFound
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _watch(self) -> None:
        pause = LOOK_EVERY_S
        while True:
            await asyncio.sleep(pause)
            changed, spent = await asyncio.to_thread(self._look)
            pause = max(LOOK_EVERY_S, spent / WATCHING_SHARE)
            if changed:
                async with self._news:
                    self._version += 1
                    self._news.notify_all()

    def _look(self) -> tuple[bool, float]:
        """Whether anything is new, once its figures are known; the seconds of CPU that took."""
        began = time.thread_time()
        changed = self.run.look()
        if changed:
            _ = self.run.summary
        return changed, time.thread_time() - began

    async def _page(self, _request: web.Request) -> web.Response:
        index = await asyncio.to_thread(self.run.index)
        blobs = embedded("index", index) + embedded("vocabularies", [])
        text = build_page("page.html", SCRIPTS, title=index["title"], blobs=blobs, connect="'self'")
        return web.Response(text=text, content_type="text/html", headers={"Cache-Control": "no-store"})

    async def _rollout(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        if number >= len(self.run.entries):
            raise web.HTTPNotFound
        shown = await asyncio.to_thread(self.run.detail, number)
        body = orjson.dumps(shown, option=orjson.OPT_NON_STR_KEYS)
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events. The id of each says how many rollouts the page has then, so that it can ask again."""
        given = request.headers.get("Last-Event-ID", request.query.get("from", "0"))
        known = int(given) if given.isdecimal() else 0
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await answer.prepare(request)
        version, runs = -1, self.run.runs
        while True:
            async with self._news:
                await self._news.wait_for(lambda: self._version != version)  # noqa: B023  # read while waiting
                version = self._version
            if self.run.runs != runs:
                await answer.write(b"event: again\ndata: {}\n\n")
                return answer
            news = await asyncio.to_thread(self.run.news, known)
            known += len(news["rollouts"])
            data = orjson.dumps(news, option=orjson.OPT_NON_STR_KEYS)
            await answer.write(b"event: run\nid: %d\ndata: %b\n\n" % (known, data))


def open_run(followed: LiveRun) -> LiveRun:
    """The run, read for the first time; UsageError when there is none."""
    if not followed.source.parent.is_dir():
        raise UsageError(f"there is no run at {followed.source.parent}")
    try:
        followed.look()
    except OSError as error:
        raise UsageError(f"cannot read {followed.source}: {error.strerror or error}") from error
    if followed.unreadable:
        raise UsageError(followed.unreadable[0])
    return followed
