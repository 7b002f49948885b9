"""What a tool is, and what it is given when it runs. One module of this folder per tool defines one `TOOL`.

A tool's function returns a JSON object. What the model did wrong is raised as `ToolFailure`; a fault of the sandbox
(`SandboxError` other than a file error) passes through untouched and ends the rollout.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from agent_loop.model.contract import ToolSchema
from agent_loop.tools.output import Redactor, dump
from agent_loop.turn.tool_call import ToolCallRecord, ToolOutcome, ToolStatus

if TYPE_CHECKING:
    from agent_loop.tools.config import ToolConfig
    from agent_loop.tools.files.workspace import Workspace
    from agent_loop.tools.shell.process_table import ProcessTable
    from agent_loop.tools.todo import TodoList
    from agent_loop.tools.web.web_tools import WebProvider
    from sandbox_pool.client.sandbox import Sandbox


T = TypeVar("T")


class ToolFailure(Exception):
    """The call failed for a reason the model can read and act on; becomes `{"error": message, **fields}`."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields


class InvalidArguments(ToolFailure):
    """The call did not run: its arguments are not what the tool's schema asks for."""


class ToolsetError(ValueError):
    """An unknown toolset, tool or distribution, or a selection without any tool. For the user, not for the model."""


class NestedCaller(Protocol):
    """Runs a call that a script made, under the rules of the rollout."""

    async def __call__(self, name: str, arguments: Any) -> ToolCallRecord:
        """The call as it ended: its `text` is for the script, the rest for the trajectory."""


@dataclass
class CallContext:
    """Everything the tools of one rollout share. Nothing in here outlives the rollout or is seen by another."""

    sandbox: Sandbox
    config: ToolConfig
    workspace: Workspace
    processes: ProcessTable
    todo: TodoList
    redact: Redactor
    web: WebProvider | None
    script_tools: tuple[Tool, ...]
    """What execute_code offers to scripts: the rollout's own tools that are fit for it, and no others."""
    call_nested: NestedCaller
    own_context: Any = None
    """What a user's own tools get as `ctx`."""
    on_activity: Callable[[str], None] | None = None

    def while_running(self, name: str) -> Callable[[float], None] | None:
        """What `Sandbox.exec` calls now and then while a command of this tool runs."""
        tell = self.on_activity
        return None if tell is None else lambda elapsed_s: tell(f"{name} has been running for {elapsed_s:.0f} s")


def outcome_of(
    data: dict[str, Any],
    *,
    timed_out: bool = False,
    exit_code: int | None = None,
    nested: tuple[ToolCallRecord, ...] = (),
) -> ToolOutcome:
    """The outcome of a call that ran and gave this JSON object; its `error` and `exit_code` are read from there."""
    error = data.get("error")
    exit_code = data.get("exit_code", exit_code)
    return ToolOutcome(
        dump(data),
        ToolStatus.TIMEOUT if timed_out else ToolStatus.ERROR if error else ToolStatus.OK,
        exit_code=exit_code if isinstance(exit_code, int) else None,
        error=str(error) if error else None,
        nested=nested,
    )


INLINE_CHARS = 20_000


async def work_out(size_chars: int, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function whose time grows with this size: a large one in a thread, so that other rollouts go on."""
    if size_chars <= INLINE_CHARS:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


ToolFunction = Callable[[CallContext, dict[str, Any]], Awaitable[dict[str, Any] | ToolOutcome]]
"""A tool that has facts for the records besides its JSON object returns `outcome_of` it."""


@dataclass(frozen=True)
class Tool:
    """One callable of the model: its schema, its function, and how it may be used."""

    schema: dict[str, Any]
    """{"name", "description", "parameters"}, with the names that models trained on hermes-agent know."""
    toolset: str
    run: ToolFunction
    parallel_safe: bool = False
    script_parameters: tuple[str, ...] | None = None
    """Parameters of the function that execute_code offers to scripts, in order; None: not offered."""
    timeout_s: float | None = None
    """How long a call may take; None: as long as the limits of the rollout allow."""
    listed: bool = True
    """Whether the prompt shows it. One that is not listed can be called by a model that was told of it later."""

    @property
    def name(self) -> str:
        return str(self.schema["name"])

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.schema["parameters"])

    def openai_schema(self) -> ToolSchema:
        """The schema as it goes into the prompt."""
        return {"type": "function", "function": json.loads(json.dumps(self.schema))}


def load_schema(name: str) -> dict[str, Any]:
    text = files("agent_loop.tools").joinpath("schemas", f"{name}.json").read_text("utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
