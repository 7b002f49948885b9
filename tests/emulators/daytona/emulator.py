"""The HTTP side: Daytona's API, the toolbox of each sandbox, and the preview proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from emulators.daytona.sandbox import EmulatedSandbox

API_KEY = "dtn_test"


@dataclass
class Entry:
    """A sandbox as the API shows it, and the sandbox itself."""

    asked: dict[str, Any]
    box: EmulatedSandbox
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    state: str = "started"
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    active_minute: float = 0.0
    refreshed: int = 0
    """How often a client said that it is in use."""
    preview_token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def shown(self, url: str) -> dict[str, Any]:
        asked = self.asked
        fixed = {"organizationId": "org", "user": "root", "public": False, "networkBlockAll": False, "kvm": False}
        sizes = {
            "cpu": asked.get("cpu") or 1,
            "gpu": 0,
            "memory": asked.get("memory") or 1,
            "disk": asked.get("disk") or 3,
        }
        kept = {name: asked.get(name) for name in ("snapshot", "autoStopInterval", "autoDeleteInterval")}
        if asked.get("buildInfo"):
            times = {"createdAt": self.created, "updatedAt": self.created}
            kept["buildInfo"] = {**asked["buildInfo"], **times, "snapshotRef": f"built-{self.id}"}
        return {
            **fixed,
            **sizes,
            **{name: value for name, value in kept.items() if value is not None},
            "id": self.id,
            "name": asked["name"],
            "labels": asked.get("labels") or {},
            "env": asked.get("env") or {},
            "target": asked.get("target") or "local",
            "state": self.state,
            "createdAt": self.created,
            "toolboxProxyUrl": f"{url}/toolbox",
        }


def _image(asked: dict[str, Any]) -> str | None:
    """The snapshot that is named, or the base of the Dockerfile that the SDK makes of an image's name."""
    lines = ((asked.get("buildInfo") or {}).get("dockerfileContent") or "").split("\n")
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    return asked.get("snapshot") or (bases[0] if bases else None)


class DaytonaEmulator:
    """`async with DaytonaEmulator() as daytona`: serves at `daytona.url`. Its clock goes on by `pass_minutes` alone."""

    def __init__(self) -> None:
        self.url = ""
        self._minute = 0.0
        self.entries: dict[str, Entry] = {}
        self.images: dict[str, Path] = {}
        """Snapshots and images that are known by name -> what is in them; the default snapshot has no name."""
        self.lose_answers_to: set[str] = set()
        """Paths whose next request is carried out and not answered."""
        app = web.Application(client_max_size=1 << 30, middlewares=[self._checked])
        app.add_routes(
            [
                web.post("/api/sandbox", self._create),
                web.get("/api/sandbox", self._list),
                web.get("/api/sandbox/{id}", self._get),
                web.delete("/api/sandbox/{id}", self._delete),
                web.post("/api/sandbox/{id}/last-activity", self._refresh),
                web.get("/api/sandbox/{id}/ports/{port}/preview-url", self._preview_url),
                web.post("/toolbox/{id}/process/execute", self._execute),
                web.get("/preview/{id}/{port}", self._preview),
            ]
        )
        self._runner = web.AppRunner(app)

    async def __aenter__(self) -> DaytonaEmulator:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(entry.box.end() for entry in self.entries.values()))
        await self._runner.cleanup()

    @property
    def running(self) -> list[str]:
        """Names of the sandboxes that exist."""
        return sorted(entry.asked["name"] for entry in self.entries.values())

    async def lose(self, name: str) -> None:
        """A runner dies: the sandbox is gone, and the API says that it failed."""
        entry = self._entry(name)
        entry.state = "error"
        await entry.box.end()

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path.startswith("/api") and request.headers.get("Authorization") != f"Bearer {API_KEY}":
            return web.json_response({"message": "Unauthorized", "statusCode": 401}, status=401)
        answer: web.StreamResponse = await handler(request)
        if f"{request.method} {request.path}" in self.lose_answers_to:
            self.lose_answers_to.discard(f"{request.method} {request.path}")
            assert request.transport is not None
            request.transport.abort()
        return answer

    def _entry(self, name: str) -> Entry:
        for entry in self.entries.values():
            if name in (entry.id, entry.asked["name"]):
                return entry
        message = f"Sandbox with ID or name {name} not found"
        raise web.HTTPNotFound(
            text=json.dumps({"message": message, "statusCode": 404}), content_type="application/json"
        )

    def _of(self, request: web.Request) -> Entry:
        entry = self._entry(request.match_info["id"])
        entry.active_minute = self._minute
        return entry

    async def _create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        asked["name"] = asked.get("name") or uuid.uuid4().hex
        if asked["name"] in self.running:
            message = f"Sandbox with name {asked['name']} already exists"
            return web.json_response({"message": message, "statusCode": 409}, status=409)
        image = _image(asked)
        if image and image not in self.images:
            return web.json_response({"message": f"Snapshot {image} not found", "statusCode": 404}, status=404)
        box = EmulatedSandbox(self.images[image]) if image else EmulatedSandbox()
        entry = Entry(asked, box, active_minute=self._minute)
        self.entries[entry.id] = entry
        await entry.box.start()
        return web.json_response(entry.shown(self.url))

    async def _list(self, request: web.Request) -> web.Response:
        wanted = json.loads(request.query.get("labels") or "{}").items()
        found = [entry for entry in self.entries.values() if wanted <= (entry.asked.get("labels") or {}).items()]
        return web.json_response({"items": [entry.shown(self.url) for entry in found], "nextCursor": None})

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._entry(request.match_info["id"]).shown(self.url))

    async def _delete(self, request: web.Request) -> web.Response:
        return web.json_response(await self._destroy(self._of(request)))

    async def _destroy(self, entry: Entry) -> dict[str, Any]:
        entry.state = "destroyed"
        await entry.box.end()
        self.entries.pop(entry.id, None)
        return entry.shown(self.url)

    async def _refresh(self, request: web.Request) -> web.Response:
        self._of(request).refreshed += 1
        return web.Response(status=201)

    async def _preview_url(self, request: web.Request) -> web.Response:
        entry = self._of(request)
        url = f"{self.url}/preview/{entry.id}/{request.match_info['port']}"
        return web.json_response({"sandboxId": entry.id, "url": url, "token": entry.preview_token})

    async def _execute(self, request: web.Request) -> web.Response:
        asked = await request.json()
        code, result = await self._of(request).box.run(asked["command"], asked.get("timeout"))
        return web.json_response({"exitCode": code, "result": result})

    async def _preview(self, request: web.Request) -> web.StreamResponse:
        """A WebSocket, passed on byte by byte as a proxy does."""
        entry = self._of(request)
        if request.headers.get("X-Daytona-Preview-Token") != entry.preview_token:
            return web.Response(status=401)
        try:
            inner = await entry.box.connect(int(request.match_info["port"]))
        except OSError:
            return web.Response(status=502, text="bad gateway")
        reader, writer = await asyncio.open_connection(sock=inner)
        kept = {name: text for name, text in request.headers.items() if name != "X-Daytona-Preview-Token"}
        head = "".join(f"{name}: {text}\r\n" for name, text in kept.items())
        writer.write(f"GET / HTTP/1.1\r\n{head}\r\n".encode())
        outer = request.transport
        assert isinstance(outer, asyncio.Transport)

        class Pass(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                writer.write(data)

            def connection_lost(self, error: Exception | None) -> None:
                writer.close()

        outer.set_protocol(Pass())
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                outer.write(data)
        outer.close()
        writer.close()
        return web.Response()

    async def pass_minutes(self, minutes: float) -> None:
        """Let time pass: what was not in use for its auto-stop interval stops, and is deleted when it is ephemeral."""
        self._minute += minutes
        for entry in list(self.entries.values()):
            limit = entry.asked.get("autoStopInterval") or 0
            if limit and entry.state == "started" and self._minute - entry.active_minute >= limit:
                entry.state = "stopped"
                await entry.box.end()
                if entry.asked.get("autoDeleteInterval") == 0:
                    await self._destroy(entry)
