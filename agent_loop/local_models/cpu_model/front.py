"""One address for a model whose weights change: a front before llama.cpp that holds, merges, forwards and swaps.

`async with SwappableModel(weights="Q8_0") as front:` serves llama.cpp's own API at `front.url`. What it adds:

- `/completion` waits while the gate is closed; `/eval/completion` never does.
- Requests of one group are merged (merge.py) and sent one merged request at a time; instead of the server's prompt
  cache, a beginning that all prompts share is read once (`share_prefix`): the tokens depend on prompt, seed and weights
  alone, not on what was asked before or beside them. The evaluation lane keeps the cache: repeatable up to rounding.
- `POST /control/pause`: closes the gate; answers when nothing is in flight.
- `POST /control/weights {"adapter": PATH, "version": "7"}`: a new server with these weights takes over when the old
  one's last request is answered; then `before_open("7")` is awaited and the gate opens.
- `GET /control/stats`: requests, tokens and busy seconds of each lane.

Each answer's `model` is "NAME@VERSION": the weights that really sampled it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import aiohttp
import orjson
from aiohttp import web

from agent_loop.local_models.cpu_model.llama_server import CpuModel, CpuModelError
from agent_loop.local_models.cpu_model.merge import Merger
from agent_loop.local_models.cpu_model.prefix import SharedPrefix
from agent_loop.model.backends.backend import GROUP, GROUP_ID


class Gate:
    """`async with gate.passing(turn)`: only while the gate is open, and only in turn."""

    def __init__(self, is_open: bool) -> None:
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0
        if is_open:
            self._open.set()

    @property
    def is_open(self) -> bool:
        """Whether work passes."""
        return self._open.is_set()

    def open(self) -> None:
        """Let work pass."""
        self._open.set()

    async def close(self) -> None:
        """Let nothing more in; returns when nothing is inside."""
        self._open.clear()
        await self._empty.wait()

    async def opened(self) -> None:
        """Wait until it is open."""
        while not self._open.is_set():
            await self._open.wait()

    @asynccontextmanager
    async def passing(self, turn: asyncio.Semaphore) -> AsyncIterator[None]:
        """Inside the gate. Who waits for its turn is outside still, so that closing does not wait for a whole queue."""
        while True:
            await self.opened()
            async with turn:
                if not self.is_open:
                    continue
                self._inside += 1
                self._empty.clear()
                try:
                    yield
                finally:
                    self._inside -= 1
                    if not self._inside:
                        self._empty.set()
                return


@dataclass
class LaneStats:
    """What one lane did."""

    requests: int = 0
    """As asked."""
    sent: int = 0
    """As sent to the server: merged ones count once."""
    sampled_tokens: int = 0
    read_tokens: int = 0
    busy_s: float = 0.0


@dataclass
class Lane:
    """Its gate, what it merges, and its figures."""

    gate: Gate
    merger: Merger
    stats: LaneStats = field(default_factory=LaneStats)


COMPLETION = "completion"
HELD = frozenset({COMPLETION, "completions", "v1/completions", "v1/chat/completions"})
"""Paths that sample."""
MAX_BODY_BYTES = 1 << 28
DROPPED_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})

BeforeOpen = Callable[[str], Awaitable[None]]


class _Refused(Exception):
    """The server's own error answer, to be passed on as it is."""

    def __init__(self, status: int, payload: bytes) -> None:
        super().__init__(payload[:500].decode("utf-8", "replace"))
        self.status, self.payload = status, payload


class SwappableModel:
    """The front. Options are those of `CpuModel`; with `held` the gate stays closed until `open` is called."""

    def __init__(
        self,
        *,
        adapter: Path | None = None,
        version: str = "0",
        before_open: BeforeOpen | None = None,
        held: bool = False,
        group_wait_s: float = 2.0,
        parallel: int = 8,
        **options: Any,
    ) -> None:
        self.version = version
        self.url = ""
        self._adapter, self._before_open = adapter, before_open
        self._options = {**options, "parallel": parallel}
        self._model: CpuModel | None = None
        # One at a time: what else is in the server's batch would change the last digits of a logprob.
        self._turn = asyncio.Semaphore(1)
        self._train = Lane(Gate(not held), Merger(parallel, group_wait_s))
        self._eval = Lane(Gate(True), Merger(parallel, group_wait_s))
        self._prefix = SharedPrefix()
        self._swapping = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None
        self._stack = AsyncExitStack()

    @property
    def model(self) -> CpuModel:
        """The server that answers now."""
        if self._model is None:
            raise RuntimeError("SwappableModel is used inside `async with`")
        return self._model

    async def __aenter__(self) -> Self:
        try:
            self._stack.enter_context(self._prefix)
            no_limit = aiohttp.ClientTimeout(total=None, connect=30.0)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = await self._stack.enter_async_context(
                aiohttp.ClientSession(timeout=no_limit, connector=connector, auto_decompress=False)
            )
            self._model = await self._start(self._adapter, self.version)
            self._stack.push_async_callback(self._stop_model)
            for lane in (self._train, self._eval):
                self._stack.push_async_callback(lane.merger.close)
            await self._listen()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def open(self) -> None:
        """Await `before_open`, then let requests through."""
        if self._before_open is not None:
            await self._before_open(self.version)
        self._train.gate.open()

    async def share_prefix(self, ids: Sequence[int]) -> None:
        """What training prompts begin with. Call it while nothing is sampled."""
        self._prefix.set(ids)
        await self._prefix.read(self._to(self.model), self.version)

    async def swap(self, adapter: Path | None, version: str) -> None:
        """Serve these weights from now on; requests in flight are answered by the old ones."""
        async with self._swapping:
            fresh = await self._start(adapter, version)
            try:
                await self._train.gate.close()
                await self._eval.gate.close()
            except BaseException:
                await fresh.__aexit__()
                raise
            if version != self.version:
                self._prefix.forget(self.version)
            old, self._model, self.version = self.model, fresh, version
            self._eval.gate.open()
            self._end_later(old)
            await self.open()

    async def lost(self) -> str:
        """Wait until the server that answers ends by itself, which it never should; its last words."""
        while True:
            model = self.model
            words = await model.ended()
            if model is self._model:
                return words

    def stats(self) -> dict[str, Any]:
        """Figures of both lanes since the start."""
        return {"version": self.version, "train": asdict(self._train.stats), "eval": asdict(self._eval.stats)}

    async def _start(self, adapter: Path | None, version: str) -> CpuModel:
        folder = self._prefix.folder
        model = await CpuModel(**self._options, lora=adapter, version=version, state_folder=folder).__aenter__()
        try:
            await self._prefix.read(self._to(model), version)
        except BaseException:
            await model.__aexit__()
            raise
        return model

    def _end_later(self, old: CpuModel) -> None:
        task = asyncio.create_task(old.__aexit__())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _stop_model(self) -> None:
        await self.model.__aexit__()
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _listen(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/control/pause", self._on_pause),
                web.post("/control/weights", self._on_weights),
                web.get("/control/stats", self._on_stats),
                web.route("*", "/eval/{path:.*}", self._on_eval),
                web.route("*", "/{path:.*}", self._on_train),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _on_pause(self, _request: web.Request) -> web.Response:
        await self._train.gate.close()
        return web.json_response({"paused": True, "version": self.version})

    async def _on_stats(self, _request: web.Request) -> web.Response:
        return web.json_response(self.stats())

    async def _on_weights(self, request: web.Request) -> web.Response:
        try:
            wanted = orjson.loads(await request.read())
            adapter, version = wanted.get("adapter"), str(wanted["version"])
        except (orjson.JSONDecodeError, AttributeError, KeyError):
            return _error(400, 'weights are given as {"adapter": PATH, "version": "7"}')
        path = Path(adapter) if adapter else None
        if path is not None and not await asyncio.to_thread(path.is_file):
            return _error(400, f"no adapter file at {path}")
        try:
            await self.swap(path, version)
        except CpuModelError as error:
            return _error(500, str(error))
        return web.json_response({"version": self.version})

    async def _on_train(self, request: web.Request) -> web.Response:
        return await self._answer(request, self._train)

    async def _on_eval(self, request: web.Request) -> web.Response:
        return await self._answer(request, self._eval)

    async def _answer(self, request: web.Request, lane: Lane) -> web.Response:
        path = request.match_info["path"]
        data = await request.read()
        try:
            if path not in HELD:
                return await self._pass_on(request, path, data)
            lane.stats.requests += 1
            if path != COMPLETION:
                async with lane.gate.passing(self._turn):
                    return await self._pass_on(request, path, data)
            return _json(await self._complete(orjson.loads(data), lane))
        except _Refused as refusal:
            return web.Response(body=refusal.payload, status=refusal.status, content_type="application/json")
        except orjson.JSONDecodeError:
            return _error(400, "the body is not JSON")
        except (aiohttp.ClientError, ValueError) as error:
            return _error(502, f"the model server gave no answer: {error or type(error).__name__}")

    async def _complete(self, body: Any, lane: Lane) -> Any:
        grouped = isinstance(body, dict) and bool(body.get(GROUP))

        async def send(merged: dict[str, Any]) -> Any:
            async with lane.gate.passing(self._turn):
                if grouped and lane is self._train:
                    await self._prefix.use(self._to(self.model), self.version, merged)
                return await self._sample(merged, lane)

        return await (lane.merger.ask(body, send, lane.gate.opened) if grouped else send(body))

    async def _sample(self, body: dict[str, Any], lane: Lane) -> Any:
        body.pop(GROUP_ID, None)
        began = time.monotonic()
        try:
            answer = await self._post(self.model, f"/{COMPLETION}", body)
        finally:
            lane.stats.busy_s += time.monotonic() - began
        lane.stats.sent += 1
        answers = answer if isinstance(answer, list) else [answer]
        lane.stats.sampled_tokens += sum(int(one.get("tokens_predicted", 0)) for one in answers)
        lane.stats.read_tokens += int(answers[0].get("timings", {}).get("prompt_n", 0)) if answers else 0
        return answer

    def _to(self, model: CpuModel) -> Callable[[str, dict[str, Any]], Awaitable[Any]]:
        return partial(self._post, model)

    async def _post(self, model: CpuModel, path: str, body: dict[str, Any]) -> Any:
        assert self._session is not None
        headers = {"Content-Type": "application/json"}
        async with self._session.post(model.url + path, data=orjson.dumps(body), headers=headers) as response:
            payload = await response.read()
        if response.status >= 400:
            raise _Refused(response.status, payload)
        return orjson.loads(payload)

    async def _pass_on(self, request: web.Request, path: str, data: bytes) -> web.Response:
        assert self._session is not None
        headers = {k: v for k, v in request.headers.items() if k.lower() not in DROPPED_HEADERS}
        query = f"?{request.query_string}" if request.query_string else ""
        async with self._session.request(
            request.method, f"{self.model.url}/{path}{query}", data=data or None, headers=headers
        ) as response:
            payload = await response.read()
            kept = {k: v for k, v in response.headers.items() if k.lower() not in DROPPED_HEADERS}
            return web.Response(body=payload, status=response.status, headers=kept)


def _json(answer: Any) -> web.Response:
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"code": status, "message": message}}, status=status)
