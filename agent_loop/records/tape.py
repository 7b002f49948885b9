"""A tape of one rollout: whatever reaches it from outside (model answers, slot results, random names, the time), in the
order in which it came.

`Tape` records while the rollout runs. `Replay` plays a tape back to the same code, without model and slots: each
request must be one that the tape has, and its answers come when everything before them on the tape has happened. The
first request that the tape does not have is a `Divergence`; nothing is ever made up.

Code that talks to the outside asks `playing`, a context variable, for the tape of its rollout; most rollouts have none.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import orjson

T = TypeVar("T")
Entry = dict[str, Any]
Drawn = TypeVar("Drawn", str, float)

PATIENCE_S = 30.0
"""How long a replay waits for a request that the tape has next, while somebody waits for what comes after it."""
SHOWN_CHARS = 400


class Diverged(Exception):
    """A replayed rollout did something else than the recorded one; `Replay.divergence` says what."""


@dataclass(frozen=True)
class Divergence:
    """The first difference between a recording and its replay."""

    place: str
    recorded: str
    now: str

    def __str__(self) -> str:
        return f"{self.place}\n  recorded: {self.recorded}\n  now:      {self.now}"


class Tape:
    """Records one rollout. `entries` are plain JSON objects."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._requests = 0

    def sent(self, kind: str, request: Mapping[str, Any]) -> int:
        """The rollout asked for something; the number that its answers name."""
        number, self._requests = self._requests, self._requests + 1
        self.entries.append({"sent": number, "kind": kind, "request": as_json(request)})
        return number

    def came(self, number: int, what: str, **values: Any) -> None:
        """Something came for a request: `reply` and `error` are the last, anything else may come before."""
        self.entries.append({"came": number, "what": what, **as_json(values)})

    def drawn(self, kind: str, draw: Callable[[], Drawn]) -> Drawn:
        """A value that nobody asked for over a wire: a random name, the time."""
        value = draw()
        self.entries.append({"drawn": kind, "value": value})
        return value


class Replay:
    """Plays a tape back. `divergence` is the first difference; the code under replay gets `Diverged` for it."""

    def __init__(self, entries: Iterable[Entry], patience_s: float = PATIENCE_S) -> None:
        given = list(entries)
        self._entries = [entry for entry in given if "drawn" not in entry]
        self._drawn: defaultdict[str, deque[Any]] = defaultdict(deque)
        for entry in given:
            if "drawn" in entry:
                self._drawn[entry["drawn"]].append(entry["value"])
        self._answered = {e["came"] for e in self._entries if e.get("what") in ("reply", "error")}
        self._position = 0
        self._made: set[int] = set()
        self._arrived: defaultdict[int, asyncio.Queue[Entry]] = defaultdict(asyncio.Queue)
        self._patience_s = patience_s
        self.divergence: Divergence | None = None

    def sent(self, kind: str, request: Mapping[str, Any]) -> int:
        """The rollout asks for something: the number of the same request on the tape."""
        wanted = as_json(request)
        for entry in self._open_requests():
            if entry["kind"] == kind and entry["request"] == wanted:
                self._made.add(entry["sent"])
                self._advance()
                return int(entry["sent"])
        following = next(self._open_requests(), None)
        recorded = "the end" if following is None else _shown(following["kind"], following["request"], wanted)
        other = {} if following is None or following["kind"] != kind else following["request"]
        raise self.diverge(self.place(), recorded, _shown(kind, wanted, other))

    async def arrived(self, number: int) -> Entry:
        """The next thing that the tape has for a request. A request that was never answered is not answered now."""
        queue = self._arrived[number]
        if number not in self._answered:
            return await queue.get()
        try:
            async with asyncio.timeout(self._patience_s) as timer:
                return await queue.get()
        except TimeoutError:
            if not timer.expired():
                raise
            missing = next(self._open_requests())
            recorded = _shown(missing["kind"], missing["request"], {})
            waits = f"nothing but waiting for the answer to request {number}, which came after that"
            raise self.diverge(self.place(), recorded, waits) from None

    def drawn(self, kind: str, _draw: Callable[[], Drawn]) -> Drawn:
        """The value that was drawn when the tape was recorded."""
        if not self._drawn[kind]:
            raise self.diverge(self.place(), f"no more values of kind {kind}", f"one more value of kind {kind}")
        value: Drawn = self._drawn[kind].popleft()
        return value

    def diverge(self, place: str, recorded: str, now: str) -> Diverged:
        """Note a difference, unless an earlier one explains it, and give what is to be raised for it."""
        if self.divergence is None:
            self.divergence = Divergence(place, recorded, now)
        return Diverged(str(self.divergence))

    def end(self) -> None:
        """The rollout is over: what the tape still expects is a difference."""
        if (missing := next(self._open_requests(), None)) is not None:
            self.diverge(self.place(), _shown(missing["kind"], missing["request"], {}), "the end")

    def place(self) -> str:
        """Where the replay is."""
        total = sum("sent" in entry for entry in self._entries)
        return f"request {len(self._made) + 1} of {total}"

    def _open_requests(self) -> Iterator[Entry]:
        return (e for e in self._entries[self._position :] if "sent" in e and e["sent"] not in self._made)

    def _advance(self) -> None:
        """Deliver what came, up to the first request that was not made yet."""
        for entry in self._entries[self._position :]:
            if "sent" in entry:
                if entry["sent"] not in self._made:
                    return
            else:
                self._arrived[entry["came"]].put_nowait(entry)
            self._position += 1


playing: ContextVar[Tape | Replay | None] = ContextVar("playing", default=None)
"""The tape of the rollout that this code belongs to, if it has one."""


async def exchange(
    kind: str,
    request: Callable[[], Mapping[str, Any]],
    perform: Callable[[], Awaitable[T]],
    store: Callable[[T], Any],
    restore: Callable[[Any], T],
    errors: Callable[[BaseException], Mapping[str, Any] | None],
    restore_error: Callable[[Mapping[str, Any]], BaseException],
) -> T:
    """One question and its answer: performed, and recorded where there is a tape; taken from the tape in a replay.

    `errors` gives an exception as plain data, or None for one that is not an answer (a cancellation).
    """
    tape = playing.get()
    if tape is None:
        return await perform()
    number = tape.sent(kind, request())
    if isinstance(tape, Replay):
        entry = await tape.arrived(number)
        if entry["what"] == "error":
            raise restore_error(entry["error"])
        return restore(entry["value"])
    try:
        answer = await perform()
    except BaseException as error:
        if (stored := errors(error)) is not None:
            tape.came(number, "error", error=stored)
        raise
    tape.came(number, "reply", value=store(answer))
    return answer


def random_name(n_bytes: int) -> str:
    """`secrets.token_hex`, the same again in a replay."""
    return _drawn("random", lambda: secrets.token_hex(n_bytes))


def seconds() -> float:
    """`time.monotonic`, the same again in a replay: for times that the model reads."""
    return _drawn("seconds", time.monotonic)


def utc_now() -> str:
    """The date and time, the same again in a replay."""
    return _drawn("date", lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def _drawn(kind: str, draw: Callable[[], Drawn]) -> Drawn:
    tape = playing.get()
    return draw() if tape is None else tape.drawn(kind, draw)


def as_json(value: Any) -> Any:
    """Plain data as it is after a way through JSON; bytes become `{"text": ...}` or `{"base64": ...}`."""
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        try:
            return {"text": data.decode()}
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(data).decode()}
    if isinstance(value, str):
        # A lone surrogate, with which bytes travel in texts, is not JSON.
        return value if value.isascii() or _encodable(value) else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [as_json(item) for item in value]
    return value


def as_bytes(stored: Mapping[str, str]) -> bytes:
    """The inverse of `as_json` for bytes."""
    return base64.b64decode(stored["base64"]) if "base64" in stored else stored["text"].encode()


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(kind: str, request: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """A request in one line; beside another one only what differs, and of long lists only from where they part."""
    parts = {key: value for key, value in request.items() if not other or other.get(key) != value} or dict(request)
    shown = {}
    for key, value in parts.items():
        before = other.get(key)
        if isinstance(value, list) and isinstance(before, list):
            both = zip(value, before, strict=False)
            at = next((k for k, (a, b) in enumerate(both) if a != b), min(len(value), len(before)))
            shown[f"{key} ({len(value)}), from {at} on"] = value[at:]
        else:
            shown[key] = value
    text = orjson.dumps(shown).decode()
    return f"{kind} {text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + ' ...'}"
