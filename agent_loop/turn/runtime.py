"""What the loop asks of tools: schemas, one call, and a few facts about each. The loop knows nothing of sandboxes.

A runtime belongs to one rollout. `call` returns a `ToolOutcome` for everything the model should see, errors included;
it raises `sandbox_pool.errors.SandboxError` when the sandbox itself is gone, which ends the rollout.
`HandlerRuntime` makes a runtime of hermes-agent's `tool_handler(name, args, task_id) -> str`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

from agent_loop.model.contract import Message, ToolSchema
from agent_loop.turn.tool_call import ToolOutcome, ToolStatus

Answer = TypeVar("Answer")


class ToolRuntime(Protocol):
    """The tools of one rollout."""

    def schemas(self) -> Sequence[ToolSchema]:
        """The tools the model may call, as OpenAI tool schemas."""

    async def call(self, name: str, arguments: dict[str, Any], *, call_id: str) -> ToolOutcome:
        """Run one call; `arguments` fit the tool's schema. Cancelling it must stop what it runs."""

    def parallel_safe(self, name: str) -> bool:
        """Whether calls of this tool may run at the same time as other calls of the turn."""

    def pending_notices(self) -> Sequence[Message]:
        """Messages to put into the conversation before the next turn, each handed out once."""

    async def wait_for_notice(self) -> bool:
        """Wait for the next such message; False at once when none is to be expected."""

    async def store_result(self, text: str) -> str | None:
        """Keep an over-long result whole where the model can read it; its path, or None if there is no such place."""


ToolHandler = Callable[[str, dict[str, Any], str], Any]
"""A coroutine function, or a plain one: that runs in a thread, as long as `tool_timeout_s` allows."""


class HandlerRuntime:
    """A runtime over `tool_handler(name, args, task_id)`, as hermes-agent has it."""

    def __init__(
        self,
        handler: ToolHandler,
        schemas: Sequence[ToolSchema],
        task_id: str,
        parallel_tools: Collection[str] = (),
        base: ToolRuntime | None = None,
    ) -> None:
        self._handler = handler
        self._schemas = list(schemas)
        self._task_id = task_id
        self._parallel = frozenset(parallel_tools)
        self._base = base

    def schemas(self) -> Sequence[ToolSchema]:
        return self._schemas

    async def call(self, name: str, arguments: dict[str, Any], *, call_id: str) -> ToolOutcome:
        """Ask the handler; its return value is read for an error and an exit code."""
        try:
            if _is_async(self._handler):
                result = self._handler(name, arguments, self._task_id)
            else:
                result = await in_thread(lambda: self._handler(name, arguments, self._task_id))
            return as_outcome(await result if inspect.isawaitable(result) else result)
        except SystemExit as error:  # of a library that thinks it is a program: it would end the whole run
            raise RuntimeError(f"it called sys.exit({error.code!r})") from error

    def parallel_safe(self, name: str) -> bool:
        """Only tools named in `parallel_tools`."""
        return name in self._parallel

    def pending_notices(self) -> Sequence[Message]:
        """The notices of the runtime that the handler stands in front of, when there is one."""
        return self._base.pending_notices() if self._base else ()

    async def wait_for_notice(self) -> bool:
        return await self._base.wait_for_notice() if self._base else False

    async def store_result(self, text: str) -> str | None:
        """Stored by the runtime that the handler stands in front of, when there is one."""
        return await self._base.store_result(text) if self._base else None


def _is_async(handler: ToolHandler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


async def in_thread(function: Callable[[], Answer]) -> Answer:
    """Call a blocking function in a thread of its own. Cancelled, it is left behind: nothing can stop a thread.

    Not `asyncio.to_thread`: a few handlers that hang would use up the threads that everything else needs.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Answer] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = context.run(function)
        except StopIteration as stop:  # no future takes one
            error = RuntimeError(f"the handler raised {stop!r}")
        except BaseException as raised:  # noqa: BLE001 - whatever it is, the one who waits for it gets it
            error = raised
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    context = contextvars.copy_context()
    threading.Thread(target=work, name="tool handler", daemon=True).start()
    return await done


def as_outcome(result: Any) -> ToolOutcome:
    """Read a handler's return value: a `ToolOutcome`, a string, or any JSON value.

    A JSON object with a truthy `error`, or with a negative `exit_code`, is a failed call.
    """
    if isinstance(result, ToolOutcome):
        return result
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    data = _json_object(text)
    exit_code = data.get("exit_code")
    exit_code = exit_code if isinstance(exit_code, int) and not isinstance(exit_code, bool) else None
    error = data.get("error")
    if not error and (exit_code is None or exit_code >= 0):
        return ToolOutcome(text, exit_code=exit_code)
    said = str(error) if error else f"exit code {exit_code}"
    return ToolOutcome(text, ToolStatus.ERROR, exit_code=exit_code, error=said)


def error_text(error: str, **more: Any) -> str:
    """The JSON text of an error result for the model."""
    return json.dumps({"error": error, **more}, ensure_ascii=False)


def _json_object(text: str) -> dict[str, Any]:
    if not text.lstrip().startswith("{"):
        return {}
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
