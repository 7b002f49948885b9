"""The sandboxes of one app: created once under a name, found again by it, and ended with confirmation.

A create has three outcomes: made, refused, and no answer. After no answer the sandbox is looked for by its name, and
counts as never made only when it has not appeared for a while. If one appears even later, no pool connects to its
loader, which then ends itself and the sandbox with it.

A create is never cancelled together with its caller: the handle would be lost while the sandbox runs on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import modal
from modal import exception

from sandbox_pool.errors import HostStartFailed, SandboxError
from sandbox_pool.providers.modal.modal_calls import (
    SDK_ERRORS,
    ModalExists,
    ModalFault,
    ModalMissing,
    ModalUnanswered,
    ask,
)
from sandbox_pool.providers.modal.modal_options import ModalOptions

log = logging.getLogger(__name__)

TAG_KIND = "hermes-rl"
TAG_HOST = "hermes-host"
TAG_OWNER = "hermes-owner"
TAG_EXPIRES = "hermes-expires-s"
OURS = {TAG_KIND: "host"}
"""The tag by which every sandbox of this project is found."""
LOOK_S = 0.5
"""How often a create without an answer is looked for."""
WATCH_RETRY_S = (1.0, 5.0, 15.0)
TAGS_AT_ONCE = 8
DETACH_S = 5.0
STDERR_TAIL_S = 5.0
STDERR_TAIL = 1000
Make = Callable[[], Awaitable[Mapping[str, Any]]]
"""Gets the arguments of a create together: images built, secrets named."""


@dataclass(eq=False)
class OpenSandbox:
    """A sandbox that exists, or did a moment ago."""

    name: str
    sandbox: Any
    expires_at_s: float
    ended: asyncio.Task[str]
    """Ends with the reason when the sandbox has ended."""

    async def unless_ended(self, work: Awaitable[None]) -> None:
        """Do the work, but stop when the sandbox ends meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise HostStartFailed(f"{self.name}: {self.ended.result()}{await self._stderr_tail()}")
            task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _stderr_tail(self) -> str:
        """The end of its first process's stderr, if Modal still has it."""
        with suppress(TimeoutError, *SDK_ERRORS):
            async with asyncio.timeout(STDERR_TAIL_S):
                text = str(await self.sandbox.stderr.read.aio()).strip()
                return f": {text[-STDERR_TAIL:]}" if text else ""
        return ""


class Sandboxes:
    """The sandboxes of one app that this process started or found."""

    def __init__(self, options: ModalOptions) -> None:
        self._options = options
        self._boxes: dict[str, OpenSandbox] = {}
        self._creates: dict[str, asyncio.Task[OpenSandbox]] = {}
        self._doubtful: set[str] = set()
        """Names under which a create was sent and not clearly answered."""

    async def start(self, name: str, make: Make) -> OpenSandbox:
        """The sandbox of this name: made, or the one that is there. Cancelling the caller lets the create finish."""
        if name in self._boxes:
            return self._boxes[name]
        task = self._creates.get(name)
        if task is None:
            task = self._creates[name] = asyncio.get_running_loop().create_task(self._create(name, make))
            task.add_done_callback(lambda _: self._creates.pop(name, None))
        return await asyncio.shield(task)

    def may_exist(self, name: str) -> bool:
        """Whether Modal was asked to make it and did not clearly refuse."""
        return name in self._boxes or name in self._doubtful

    async def _create(self, name: str, make: Make) -> OpenSandbox:
        arguments = dict(await make())
        self._doubtful.add(name)
        expires_at_s = time.time() + self._options.timeout_s
        arguments["tags"] = {**OURS, **arguments["tags"], TAG_HOST: name, TAG_EXPIRES: f"{expires_at_s:.0f}"}
        create = modal.Sandbox.create.aio(*arguments.pop("command"), name=name, **arguments)
        try:
            sandbox = await ask(f"create of {name}", create, self._options.create_timeout_s)
        except (ModalUnanswered, ModalExists) as error:
            sandbox = await self._find(name, wait=isinstance(error, ModalUnanswered))
            if sandbox is None:
                raise
            log.info("%s was found by its name after: %s", name, error)
            expires_at_s = await self._expiry(name, sandbox)
        except SandboxError:
            self._doubtful.discard(name)  # refused: nothing can exist
            raise
        self._doubtful.discard(name)
        ended = asyncio.get_running_loop().create_task(_ended(sandbox))
        box = self._boxes[name] = OpenSandbox(name, sandbox, expires_at_s, ended)
        return box

    async def _expiry(self, name: str, sandbox: Any) -> float:
        tags = await ask(f"tags of {name}", sandbox.get_tags.aio(), self._options.api_timeout_s)
        try:
            return float(tags[TAG_EXPIRES])
        except (KeyError, ValueError) as error:
            raise HostStartFailed(f"{name} is the name of a sandbox that is not ours: its tags are {tags}") from error

    async def stop(self, name: str) -> None:
        """Return when there is no such sandbox; raise when that cannot be confirmed."""
        await self._settle(name)
        box = self._boxes.get(name)
        sandbox = box.sandbox if box else await self._find(name, wait=name in self._doubtful)
        if sandbox is not None:
            try:
                await self._end(name, sandbox)
            finally:
                if box is None:
                    await _detach(sandbox)
        self._doubtful.discard(name)
        if box is not None:
            await self._disconnect(box)

    async def _settle(self, name: str) -> None:
        """Wait for a create that is under way; cancel one that has not asked Modal yet."""
        task = self._creates.get(name)
        if task is None:
            return
        if name in self._doubtful:
            await asyncio.wait({task}, timeout=self._options.create_timeout_s + self._options.settle_s)
        task.cancel()
        await asyncio.wait({task})

    async def _find(self, name: str, *, wait: bool) -> Any | None:
        """The running sandbox of this name, if there is one."""
        deadline_s = time.monotonic() + (self._options.settle_s if wait else 0.0)
        while True:
            looking = modal.Sandbox.from_name.aio(self._options.app, name, environment_name=self._options.environment)
            try:
                return await ask(f"look for {name}", looking, self._options.api_timeout_s)
            except ModalMissing:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                await asyncio.sleep(min(LOOK_S, left_s))

    async def _end(self, name: str, sandbox: Any) -> None:
        with suppress(ModalMissing):
            await ask(f"end of {name}", sandbox.terminate.aio(wait=True), self._options.stop_timeout_s)

    async def _disconnect(self, box: OpenSandbox) -> None:
        self._boxes.pop(box.name, None)
        box.ended.cancel()
        await asyncio.wait({box.ended})
        await _detach(box.sandbox)

    async def listed(self, app_id: str) -> list[tuple[str, dict[str, str]]]:
        """Id and tags of every running sandbox of this project in the app, whoever started it."""
        found = await ask("list of sandboxes", _collect(app_id), self._options.api_timeout_s)
        limit = asyncio.Semaphore(TAGS_AT_ONCE)

        async def tagged(sandbox: Any) -> tuple[str, dict[str, str]] | None:
            async with limit:
                try:
                    tags = await ask("tags of a sandbox", sandbox.get_tags.aio(), self._options.api_timeout_s)
                except ModalMissing:
                    return None  # ended a moment ago
                finally:
                    await _detach(sandbox)
            return sandbox.object_id, tags

        return [each for each in await asyncio.gather(*map(tagged, found)) if each is not None]

    async def close(self) -> None:
        """End sandboxes whose create is unfinished, and disconnect from the rest."""
        for name in list(self._creates):
            try:
                await self.stop(name)
            except SandboxError as error:
                log.warning("%s may be left at Modal: %s", name, error)
        for box in list(self._boxes.values()):
            await self._disconnect(box)


async def _detach(sandbox: Any) -> None:
    """Close this process's connection to it; a failure does not matter to the sandbox."""
    with suppress(ModalFault):
        await ask("detach", sandbox.detach.aio(), DETACH_S)


async def _collect(app_id: str) -> list[Any]:
    return [sandbox async for sandbox in modal.Sandbox.list.aio(app_id=app_id, tags=OURS)]


async def _ended(sandbox: Any) -> str:
    """Wait until the sandbox has ended, retrying failed waits; returns the reason."""
    failures = 0
    while True:
        try:
            await sandbox.wait.aio(raise_on_termination=False)
        except exception.SandboxTimeoutError:
            return f"Modal ended {sandbox.object_id} because its timeout was over"
        except exception.NotFoundError:
            return f"Modal does not know {sandbox.object_id} any more"
        except SDK_ERRORS as error:
            log.info("%s cannot be watched: %s", sandbox.object_id, error)
            await asyncio.sleep(WATCH_RETRY_S[min(failures, len(WATCH_RETRY_S) - 1)])
            failures += 1
        else:
            return f"{sandbox.object_id} has ended (code {sandbox.returncode}; a preempted one may say 0)"
