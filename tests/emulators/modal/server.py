"""The emulator: two gRPC servers in a thread and a loop of their own, and what tests do to them and see of them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import grpclib.server
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_grpc, api_pb2, task_command_router_grpc

from . import certificates
from .accounts import Accounts
from .backends import BACKENDS, processes
from .command_router import CommandRouter
from .faults import Faults, Limits
from .images import Images
from .rpc import service
from .sandbox import Result, Sandbox
from .sandboxes import Sandboxes
from .worker import Reach
from .world import Image, World

HOST = "127.0.0.1"
ENVIRONMENT = "main"
PREFIX = "modal-emulator-"
START_S, STOP_S = 30, 60
T = TypeVar("T")


class ModalEmulator:
    """A Modal of our own for as long as its context, or its process, lasts."""

    def __init__(self, *, runtime: str = "namespaces", port: int = 0, limits: Limits | None = None, seed: int = 0,
                 credentials: tuple[str, str] = ("ak-emulated", "as-emulated")) -> None:  # fmt: skip
        self.faults = Faults(seed)
        self.limits = limits or Limits()
        self._backend, self._port, self._credentials = BACKENDS[runtime], port, credentials
        self._backend.check()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._world: World | None = None
        self._root: Path | None = None
        self._lock: IO[bytes] | None = None

    # Its life.

    def start(self) -> Self:
        """Serve. Blocks for some 50 ms."""
        loop = self._loop = asyncio.new_event_loop()
        started: list[BaseException | None] = []
        up = threading.Event()

        def run() -> None:
            try:
                loop.run_until_complete(self._serve(lambda: (started.append(None), up.set())))
            except BaseException as problem:  # noqa: BLE001 -- told to the thread that starts it
                started.append(problem)
                up.set()
            finally:
                loop.run_until_complete(_end_tasks())
                loop.close()

        self._thread = threading.Thread(target=run, name="modal-emulator", daemon=True)
        self._thread.start()
        if not up.wait(START_S):
            raise TimeoutError("the Modal emulator did not start")
        if started[0] is not None:
            raise started[0]
        return self

    def stop(self) -> None:
        """End every sandbox, and the servers."""
        if self._thread is not None and self._thread.is_alive() and self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(STOP_S)
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *problem: object) -> None:
        await asyncio.to_thread(self.stop)

    __enter__ = start

    def __exit__(self, *problem: object) -> None:
        self.stop()

    async def _serve(self, started: Any) -> None:
        self._root, self._lock = _own_folder()
        _sweep()
        self._authority, context = certificates.make(self._root)
        world = self._world = World(self._root, self._backend, self._credentials, self.faults, self.limits, context)
        router = CommandRouter(world)
        parts: list[object] = [Accounts(world), Images(world), Sandboxes(world)]
        servicers = (
            service(api_grpc.ModalClientBase, world, parts, world.check_credentials),
            service(
                task_command_router_grpc.TaskCommandRouterBase,
                world,
                [router],
                world.check_router_token,
                router.to_worker,
            ),
        )
        servers = [grpclib.server.Server([part], status_details_codec=custom_detail_codec) for part in servicers]
        for server, port in zip(servers, (self._port, 0), strict=True):
            await server.start(HOST, port)
        self._port, router_port = (server._server.sockets[0].getsockname()[1] for server in servers)
        world.router_url = f"http://{HOST}:{router_port}"
        started()
        await self._stopping.wait()
        ends = [sandbox.finish(Result.GENERIC_STATUS_TERMINATED, 137) for sandbox in world.sandboxes.values()]
        await asyncio.gather(*ends)
        for server in servers:
            server.close()
        for sandbox in self.sandboxes:
            sandbox.close()

    # How clients reach it.

    @property
    def environ(self) -> dict[str, str]:
        """What a process with the SDK needs in its environment, the trust in our tunnels' certificate among it."""
        return {
            "MODAL_SERVER_URL": f"http://{HOST}:{self._port}",
            "MODAL_TOKEN_ID": self._credentials[0],
            "MODAL_TOKEN_SECRET": self._credentials[1],
            "MODAL_CONFIG_PATH": str(self._state.root / "no-config.toml"),
            "MODAL_ENVIRONMENT": ENVIRONMENT,
            "SSL_CERT_FILE": str(self._authority),
            "NO_PROXY": ",".join(filter(None, (os.environ.get("NO_PROXY"), HOST))),
        }

    # What tests put into it.

    @property
    def image_failures(self) -> dict[str, str]:
        """A part of a recipe, and what builds of such recipes die of."""
        return self._state.image_failures

    @property
    def secrets(self) -> dict[str, dict[str, str]]:
        """Named secrets."""
        return self._state.secrets

    def publish(self, name: str) -> None:
        """Make `Image.from_name(name)` known."""
        image_id = f"im-published{len(self._state.images):013d}"
        self._state.images[image_id] = Image(image_id, api_pb2.Image(), built=True)
        tagged = name if ":" in name else f"{name}:latest"
        self._state.published[tagged if "/" in tagged else f"{ENVIRONMENT}/{tagged}"] = image_id

    def accept_credentials(self, accept: bool) -> None:
        """False: the token is revoked, and every call to the control plane fails."""
        self._state.accepts_credentials = accept

    def expire_tokens(self) -> None:
        """No token handed out so far is taken by the workers; clients must ask for new ones."""
        self._state.router_tokens.expire()

    def expire_auth_tokens(self) -> None:
        """The same for the tokens of calls to the control plane; the credentials stay good."""
        self._state.auth_tokens.expire()

    async def preempt(self, sandbox_id: str) -> None:
        """The worker dies, and the sandbox with it."""
        await self._inside(self._end(sandbox_id, Result.GENERIC_STATUS_INTERNAL_FAILURE, "preempted"))

    async def forget(self, sandbox_id: str) -> None:
        """The sandbox dies, and the server does not know it any longer."""
        await self._inside(self._end(sandbox_id, Result.GENERIC_STATUS_TERMINATED, ""))
        self._state.ended.append(self._state.sandboxes.pop(sandbox_id))

    async def set_reach(self, sandbox_id: str, reach: Reach) -> None:
        """Whether the worker of a sandbox is reached `well`, or `hangs`, or `refuses`: commands and tunnels alike."""

        async def change() -> None:
            sandbox = self._state.sandboxes[sandbox_id]
            sandbox.worker.set_reach(reach)
            if reach == "refuses":
                sandbox.cut_tunnels()

        await self._inside(change())

    async def cut_tunnels(self, sandbox_id: str) -> None:
        """Every open connection through the tunnels of a sandbox breaks; new ones are taken."""

        async def cut() -> None:
            self._state.sandboxes[sandbox_id].cut_tunnels()

        await self._inside(cut())

    # What tests see of it.

    @property
    def calls(self) -> Counter[str]:
        """How often each RPC was called, retries of the SDK among it."""
        return self._state.calls

    @property
    def requests(self) -> list[tuple[str, Any]]:
        """The last 2000 calls: RPC and request."""
        return list(self._state.requests)

    @property
    def images(self) -> list[Image]:
        """Recipes that were asked for, and how often their build was begun."""
        return list(self._state.images.values())

    @property
    def sandboxes(self) -> list[Sandbox]:
        """All there ever were."""
        return [*self._state.ended, *self._state.sandboxes.values()]

    @property
    def alive(self) -> list[str]:
        """Ids of those that are starting or running."""
        return [sandbox.id for sandbox in self._state.running()]

    def processes(self, sandbox_id: str) -> list[int]:
        """Processes of a sandbox, running or not, by their numbers on this machine."""
        return processes(*(sandbox.backend for sandbox in self.sandboxes if sandbox.id == sandbox_id))

    def leaked_processes(self) -> list[int]:
        """Processes of sandboxes that have ended."""
        return processes(*(sandbox.backend for sandbox in self.sandboxes if sandbox.ended.is_set()))

    # Inside.

    @property
    def _state(self) -> World:
        if self._world is None:
            raise RuntimeError("the Modal emulator is not started")
        return self._world

    async def _end(self, sandbox_id: str, status: int, why: str) -> None:
        await self._state.sandboxes[sandbox_id].finish(status, 0, why)

    async def _inside(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


async def _end_tasks() -> None:
    """Calls that are still under way when the server goes."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


def _own_folder() -> tuple[Path, IO[bytes]]:
    """It has its name when it is locked, so that no sweep takes it before."""
    folder = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}"))
    lock = _lock(folder)
    return folder.rename(folder.with_name(folder.name.removeprefix("new-"))), lock


def _lock(folder: Path) -> IO[bytes]:
    """Held while the process lives, so that others can tell."""
    lock = (folder / "lock").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def _sweep() -> None:
    """Folders of emulators that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            with _lock(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
