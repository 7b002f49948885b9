"""A model whose weights change behind one address: a server in front of llama.cpp that merges and pauses requests.

`async with UpdatableModel(weights="Q8_0") as model:` serves llama.cpp's own API at `model.url`. What it adds:

- `/completion` waits while sampling is paused; `/eval/completion` never does.
- Requests of one group are merged (shared_reading.py) and sent one merged request at a time. Instead of the server's
  prompt cache, a beginning that all prompts share is read once (`share_prefix`): the tokens depend on prompt, seed and
  weights alone, not on other requests. Evaluation keeps the cache: it is repeatable up to rounding.
- `POST /control/pause`: pauses sampling; answers when no request is under way.
- `POST /control/weights {"adapter": PATH, "version": "7"}`, or `"model"` for whole weights (GGUF): a new server with
  these weights takes over when the old one has answered its last request; then `before_open("7")` is awaited and
  sampling goes on.
- `GET /control/stats`: requests, tokens and busy seconds of training and of evaluation.

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
from agent_loop.local_models.cpu_model.shared_reading import Merger, SharedPrefix
from agent_loop.model.backends.backend import GROUP, GROUP_ID


class Admission:
    """`async with admission.admitted(turn)`: only while it is open, and only in turn."""

    def __init__(self, is_open: bool) -> None:
        self._open = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._under_way = 0
        if is_open:
            self._open.set()

    def open(self) -> None:
        """Admit requests from now on."""
        self._open.set()

    async def close(self) -> None:
        """Admit no more; returns when none is under way."""
        self._open.clear()
        await self._idle.wait()

    async def opened(self) -> None:
        """Wait until it is open."""
        while not self._open.is_set():
            await self._open.wait()

    @asynccontextmanager
    async def admitted(self, turn: asyncio.Semaphore) -> AsyncIterator[None]:
        """Requests that wait for their turn are not under way yet, so that closing does not wait for a whole queue."""
        while True:
            await self.opened()
            async with turn:
                if not self._open.is_set():
                    continue
                self._under_way += 1
                self._idle.clear()
                try:
                    yield
                finally:
                    self._under_way -= 1
                    if not self._under_way:
                        self._idle.set()
                return


@dataclass
class EndpointStats:
    """What was asked of one endpoint since the start."""

    requests: int = 0
    """As asked."""
    sent: int = 0
    """As sent to the server: merged ones count once."""
    sampled_tokens: int = 0
    read_tokens: int = 0
    busy_s: float = 0.0


@dataclass
class Endpoint:
    """Training or evaluation: when its requests are admitted, how they are merged, and its figures."""

    admission: Admission
    merger: Merger
    stats: EndpointStats = field(default_factory=EndpointStats)


COMPLETION = "completion"
SAMPLING_PATHS = frozenset({COMPLETION, "completions", "v1/completions", "v1/chat/completions"})
MAX_BODY_BYTES = 1 << 28
DROPPED_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})

BeforeOpen = Callable[[str], Awaitable[None]]


class _Refused(Exception):
    """The server's own error answer, to be passed on as it is."""

    def __init__(self, status: int, payload: bytes) -> None:
        super().__init__(payload[:500].decode("utf-8", "replace"))
        self.status, self.payload = status, payload


class UpdatableModel:
    """Options are those of `CpuModel`; with `paused` training requests wait until `open` is called."""

    def __init__(
        self,
        *,
        adapter: Path | None = None,
        version: str = "0",
        before_open: BeforeOpen | None = None,
        paused: bool = False,
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
        self._train = Endpoint(Admission(not paused), Merger(parallel, group_wait_s))
        self._eval = Endpoint(Admission(True), Merger(parallel, group_wait_s))
        self._prefix = SharedPrefix()
        self._updating = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None
        self._stack = AsyncExitStack()

    @property
    def model(self) -> CpuModel:
        """The server that answers now."""
        if self._model is None:
            raise RuntimeError("UpdatableModel is used inside `async with`")
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
            for endpoint in (self._train, self._eval):
                self._stack.push_async_callback(endpoint.merger.close)
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
        self._train.admission.open()

    async def share_prefix(self, ids: Sequence[int]) -> None:
        """What training prompts begin with. Call it while nothing is sampled."""
        self._prefix.set(ids)
        await self._prefix.read(self._to(self.model), self.version)

    async def update_weights(self, adapter: Path | None, version: str, model: Path | None = None) -> None:
        """Serve these weights from now on; requests under way are answered by the old ones."""
        async with self._updating:
            if model is not None:
                self._options["model"] = model
            fresh = await self._start(adapter, version)
            try:
                await self._train.admission.close()
                await self._eval.admission.close()
            except BaseException:
                await fresh.__aexit__()
                raise
            if version != self.version:
                self._prefix.forget(self.version)
            old, self._model, self.version = self.model, fresh, version
            self._eval.admission.open()
            self._stop_later(old)
            await self.open()

    async def ended(self) -> str:
        """Wait until the server that answers ends by itself, which it never should; the end of its log."""
        while True:
            model = self.model
            log_tail = await model.ended()
            if model is self._model:
                return log_tail

    def stats(self) -> dict[str, Any]:
        """Figures of training and of evaluation since the start."""
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

    def _stop_later(self, old: CpuModel) -> None:
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
        await self._train.admission.close()
        return web.json_response({"paused": True, "version": self.version})

    async def _on_stats(self, _request: web.Request) -> web.Response:
        return web.json_response(self.stats())

    async def _on_weights(self, request: web.Request) -> web.Response:
        try:
            wanted = orjson.loads(await request.read())
            paths = [Path(wanted[name]) if wanted.get(name) else None for name in ("adapter", "model")]
            version = str(wanted["version"])
        except (orjson.JSONDecodeError, AttributeError, KeyError):
            return _error(400, 'weights are given as {"adapter": PATH, "version": "7"}')
        for path in paths:
            if path is not None and not await asyncio.to_thread(path.is_file):
                return _error(400, f"no file at {path}")
        try:
            await self.update_weights(paths[0], version, paths[1])
        except CpuModelError as error:
            return _error(500, str(error))
        return web.json_response({"version": self.version})

    async def _on_train(self, request: web.Request) -> web.Response:
        return await self._answer(request, self._train)

    async def _on_eval(self, request: web.Request) -> web.Response:
        return await self._answer(request, self._eval)

    async def _answer(self, request: web.Request, endpoint: Endpoint) -> web.Response:
        path = request.match_info["path"]
        data = await request.read()
        try:
            if path not in SAMPLING_PATHS:
                return await self._pass_on(request, path, data)
            endpoint.stats.requests += 1
            if path != COMPLETION:
                async with endpoint.admission.admitted(self._turn):
                    return await self._pass_on(request, path, data)
            return _json(await self._complete(orjson.loads(data), endpoint))
        except _Refused as refusal:
            return web.Response(body=refusal.payload, status=refusal.status, content_type="application/json")
        except orjson.JSONDecodeError:
            return _error(400, "the body is not JSON")
        except (aiohttp.ClientError, ValueError) as error:
            return _error(502, f"the model server gave no answer: {str(error) or type(error).__name__}")

    async def _complete(self, body: Any, endpoint: Endpoint) -> Any:
        grouped = isinstance(body, dict) and bool(body.get(GROUP))

        async def send(merged: dict[str, Any]) -> Any:
            async with endpoint.admission.admitted(self._turn):
                if grouped and endpoint is self._train:
                    await self._prefix.use(self._to(self.model), self.version, merged)
                return await self._sample(merged, endpoint)

        return await (endpoint.merger.ask(body, send, endpoint.admission.opened) if grouped else send(body))

    async def _sample(self, body: dict[str, Any], endpoint: Endpoint) -> Any:
        body.pop(GROUP_ID, None)
        began = time.monotonic()
        try:
            answer = await self._post(self.model, f"/{COMPLETION}", body)
        finally:
            endpoint.stats.busy_s += time.monotonic() - began
        endpoint.stats.sent += 1
        answers = answer if isinstance(answer, list) else [answer]
        endpoint.stats.sampled_tokens += sum(int(one.get("tokens_predicted", 0)) for one in answers)
        endpoint.stats.read_tokens += int(answers[0].get("timings", {}).get("prompt_n", 0)) if answers else 0
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
