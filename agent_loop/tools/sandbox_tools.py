"""The tools of one rollout, on its sandbox: what the loop calls, and what the tools keep between calls.

Whatever the model sends, the answer is valid JSON. Only a fault of the sandbox itself is raised, because it ends the
rollout; it never becomes something the model reads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from agent_loop.model.contract import Message, ToolSchema
from agent_loop.records.tape import random_name
from agent_loop.tools.config import McpServerConfig, ToolConfig
from agent_loop.tools.files.workspace import Workspace, file_failure
from agent_loop.tools.output import Redactor, dump
from agent_loop.tools.policy import AskCallback, Decision, PolicyCheck, command_text
from agent_loop.tools.script.execute_code import describe_for
from agent_loop.tools.shell.process_table import ProcessTable
from agent_loop.tools.todo import TodoList
from agent_loop.tools.tool import CallContext, InvalidArguments, Tool, ToolFailure, ToolsetError, outcome_of
from agent_loop.tools.toolsets import CATALOG, resolve
from agent_loop.tools.web.web_local import LocalWeb
from agent_loop.tools.web.web_tools import WebProvider
from agent_loop.turn.arguments import normalize
from agent_loop.turn.tool_call import ToolCallRecord, ToolOutcome, ToolStatus
from sandbox_pool.errors import SandboxError, SandboxFileError

if TYPE_CHECKING:
    from sandbox_pool.client.sandbox import Sandbox

log = logging.getLogger(__name__)

DEFAULT_TOOLSETS = ("terminal", "file")


class SandboxTools:
    """The loop's `ToolRuntime` over one leased sandbox. Use as `async with`, or call `close`."""

    def __init__(
        self,
        sandbox: Sandbox,
        toolsets: Iterable[str] = DEFAULT_TOOLSETS,
        config: ToolConfig | None = None,
        *,
        without: Iterable[str] = (),
        ask: AskCallback | None = None,
        always_allowed: set[str] | None = None,
        on_activity: Callable[[str], None] | None = None,
        web: WebProvider | None = None,
        own: Sequence[Tool] = (),
        own_context: Any = None,
        mcp: Mapping[str, McpServerConfig] | None = None,
    ) -> None:
        """`without` names single tools that the toolsets would bring and this rollout does not get.

        `own` are tools of the environment, which get `own_context` (or the sandbox) as `ctx`. The servers of `mcp` run
        from `async with` on.

        `ask` answers what a rule of the policy asks about; `always_allowed` is a set that all rollouts of a run share,
        which remembers the rules that it answered with "always". `on_activity` is told about every ten seconds that a
        command still runs.
        """
        config = config or ToolConfig()
        self._owns_web = web is None
        web = web or _web_provider(config)
        self._mcp = mcp or {}
        self._tools = chosen_tools(toolsets, without, own, bool(self._mcp))
        if web is None and (needing := [tool.name for tool in self._tools.values() if tool.toolset == "web"]):
            raise ToolsetError(f"{', '.join(needing)} need a web provider: configure `web` (local or http)")
        policy = config.policy
        self._policy_check = PolicyCheck(policy, ask, always_allowed) if policy.decides(sandbox.isolation) else None
        self._ctx = CallContext(
            sandbox=sandbox,
            config=config,
            workspace=Workspace(sandbox),
            processes=ProcessTable(sandbox, config.max_processes),
            todo=TodoList(),
            redact=Redactor.for_environment(sandbox.spec.env, config.secret_env, shapes=config.redact_shapes),
            web=web,
            script_tools=(),
            call_nested=self._call_nested,
            own_context=sandbox if own_context is None else own_context,
            on_activity=on_activity,
        )
        self._offer_to_scripts()
        self._stack = AsyncExitStack()
        self._stored = 0
        self._name = random_name(4)

    async def __aenter__(self) -> SandboxTools:
        if self._mcp:
            from agent_loop.tools.mcp_servers import mcp_tools  # the SDK takes a second to import

            found = await self._stack.enter_async_context(
                mcp_tools(self._mcp, self._ctx.sandbox, await self._ctx.workspace.scratch())
            )
            add_tools(self._tools, found)
            self._offer_to_scripts()
        return self

    def _offer_to_scripts(self) -> None:
        self._ctx.script_tools = tuple(
            tool for tool in self._tools.values() if tool.listed and tool.script_parameters is not None
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop watching processes and close connections. What runs in the sandbox ends with its lease."""
        await self._stack.aclose()
        await self._ctx.processes.close()
        if self._owns_web and self._ctx.web is not None:
            await self._ctx.web.close()

    def schemas(self) -> Sequence[ToolSchema]:
        """The rollout's tools as OpenAI schemas; execute_code's lists what its scripts may call here."""
        return [_openai_schema(tool, self._ctx) for tool in self._tools.values() if tool.listed]

    def parallel_safe(self, name: str) -> bool:
        """Whether calls of this tool may run at the same time as others of the turn."""
        tool = self._tools.get(name)
        return tool is not None and tool.parallel_safe

    def pending_notices(self) -> Sequence[Message]:
        """What background processes have to report, each once."""
        return [{"role": "user", "content": text} for text in self._ctx.processes.take_notices()]

    async def wait_for_notice(self) -> bool:
        """Wait for a process that was started with notify_on_complete; False when none of them runs."""
        return await self._ctx.processes.wait_for_notice()

    async def store_result(self, text: str) -> str | None:
        """Put an over-long result into a file of the sandbox; None when the sandbox refuses it."""
        self._stored += 1
        try:
            scratch = await self._ctx.workspace.scratch()
            path = f"{scratch}/hermes_results_{self._name}/result_{self._stored}.txt"
            await self._ctx.sandbox.write_file(path, text.encode("utf-8", "replace"))
        except SandboxFileError as error:
            log.warning("a result of %d characters could not be stored: %s", len(text), error)
            return None
        return path

    async def call(self, name: str, arguments: dict[str, Any], *, call_id: str) -> ToolOutcome:
        """Run one call whose arguments fit the tool's schema, as the loop checks. See `checked_call` for other callers.

        Raises SandboxError when the sandbox is gone.
        """
        tool = self._tools.get(name)
        if tool is None:
            return self._unknown(name)
        decision = await self._policy_check.decide(name, command_text(name, arguments)) if self._policy_check else None
        if decision is None:
            return await self._run(tool, arguments)
        metadata = {"policy": decision.as_metadata()}
        if not decision.allowed:
            return _blocked(decision, metadata)
        return replace(await self._run(tool, arguments), metadata=metadata)

    async def checked_call(self, name: str, arguments: Any) -> ToolOutcome:
        """Run a call whose arguments nobody has checked yet: a script's, or one that a reward makes."""
        tool = self._tools.get(name)
        if tool is None:
            return self._unknown(name)
        normalized = normalize(arguments, name, tool.parameters)
        if normalized.arguments is None:
            return _failed(normalized.error or f"Invalid arguments for {name}.", ToolStatus.INVALID)
        return await self.call(name, normalized.arguments, call_id="")

    def _unknown(self, name: str) -> ToolOutcome:
        return _failed(f"Unknown tool {name!r}. Available: {', '.join(sorted(self._tools))}.", ToolStatus.UNKNOWN)

    async def _run(self, tool: Tool, arguments: dict[str, Any]) -> ToolOutcome:
        if tool.name != "read_file":
            self._ctx.workspace.forget_reads()
        try:
            async with asyncio.timeout(tool.timeout_s) as timer:
                returned = await tool.run(self._ctx, arguments)
        except InvalidArguments as failure:
            return _failed(failure.message, ToolStatus.INVALID, failure.fields)
        except ToolFailure as failure:
            return _failed(failure.message, ToolStatus.ERROR, failure.fields)
        except SandboxFileError as error:
            return _failed(file_failure(error.filename or "The file", error).message, ToolStatus.ERROR)
        except (SandboxError, asyncio.CancelledError):
            raise
        except TimeoutError as error:
            if not timer.expired():
                return _failed(f"{tool.name} failed: {type(error).__name__}: {error}", ToolStatus.ERROR)
            return _failed(f"{tool.name} was stopped after {tool.timeout_s:g} s: it took too long.", ToolStatus.TIMEOUT)
        except Exception as error:  # a fault of ours must not end a rollout of theirs; it is logged and recorded
            log.exception("tool %s failed", tool.name)
            return _failed(f"{tool.name} failed: {type(error).__name__}: {error}", ToolStatus.ERROR)
        return returned if isinstance(returned, ToolOutcome) else outcome_of(returned)

    async def _call_nested(self, name: str, arguments: Any) -> ToolCallRecord:
        """A script's call: the same rules as the model's own, without the parameters that scripts do not have."""
        started = time.monotonic()
        allowed = self._tools[name].script_parameters or ()
        given = arguments if isinstance(arguments, dict) else {}
        call = ToolCallRecord(name, given, arguments=given)
        outcome = await self.checked_call(name, {key: value for key, value in given.items() if key in allowed})
        call.finish(outcome, time.monotonic() - started)
        return call


def chosen_tools(
    toolsets: Iterable[str], without: Iterable[str], own: Sequence[Tool], more_to_come: bool = False
) -> dict[str, Tool]:
    """The tools of a rollout by name, the user's own last; ToolsetError when there are none."""
    names = list(toolsets)
    enough = bool(own) or more_to_come
    tools = {name: CATALOG[name] for name in resolve(names, without)} if names or not enough else {}
    add_tools(tools, own)
    return tools


def add_tools(tools: dict[str, Tool], more: Sequence[Tool]) -> None:
    """ToolsetError for what is not a tool, or has the name of another one."""
    for tool in more:
        if not isinstance(tool, Tool):
            raise ToolsetError(f"tools() gave {tool!r}, which is not a tool: decorate the function with @tool")
        if tool.name in tools:
            way = "give its server another `prefix`, or name its `tools`" if tool.toolset == "mcp" else "@tool(name=...)"
            raise ToolsetError(f"two tools are called {tool.name!r}: rename one ({way})")
        tools[tool.name] = tool


def _web_provider(config: ToolConfig) -> WebProvider | None:
    if config.web is None:
        return None
    if config.web.provider == "local":
        return LocalWeb.from_file(config.web.corpus)
    from agent_loop.tools.web.web_http import HttpWeb  # a second of imports that most rollouts do not need

    return HttpWeb(config.web)


def _openai_schema(tool: Tool, ctx: CallContext) -> ToolSchema:
    if tool.name == "execute_code":
        return {"type": "function", "function": describe_for(tool, ctx)}
    schema = tool.openai_schema()
    if tool.name == "terminal":
        timeout = schema["function"]["parameters"]["properties"]["timeout"]
        timeout["description"] = timeout["description"].format(
            default=ctx.config.default_timeout_s, most=ctx.config.max_timeout_s
        )
    return schema


def _failed(message: str, status: ToolStatus, fields: dict[str, Any] | None = None) -> ToolOutcome:
    return ToolOutcome(dump({**(fields or {}), "error": message}), status, error=message)


def _blocked(decision: Decision, metadata: dict[str, Any]) -> ToolOutcome:
    why = f" ({decision.reason})" if decision.reason else ""
    said = f"The command was not run: the policy of this environment does not allow it{why}."
    text = dump({"output": "", "exit_code": -1, "error": said, "status": "blocked"})
    return ToolOutcome(text, ToolStatus.ERROR, exit_code=-1, error=said, metadata=metadata)
