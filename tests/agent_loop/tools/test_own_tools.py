"""`@tool`: a user's function with a schema of its own, checked, counted and recorded like our tools."""

import asyncio
import datetime
import enum
import json
import sys
import threading
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from agent_loop import HermesAgentLoop
from agent_loop.tools import SandboxTools, ToolsetError
from agent_loop.tools.own_tools import tool
from agent_loop.tools.tool import ToolFailure
from agent_loop.turn.tool_call import ToolStatus
from support.loop_servers import ScriptedServer, call, calls, says
from support.tools_calls import Tools

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Unit(enum.StrEnum):
    KG = "kg"
    POUND = "lb"


class Line(BaseModel):
    goods: str
    amount: float = Field(gt=0)


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Tree(BaseModel):
    branches: "list[Tree]" = []


@tool
async def order(
    ctx: Any,
    lines: list[Line],
    on: datetime.date,
    unit: Unit = Unit.KG,
    note: Annotated[str | None, Field(description="For the driver.")] = None,
) -> dict[str, Any]:
    """Order goods.

    Args:
        lines: What to order,
            line by line.
        on (date): The day of delivery.
    """
    ctx["orders"] = ctx.get("orders", 0) + 1
    return {"lines": len(lines), "weekday": on.strftime("%a"), "unit": unit.name, "kind": type(lines[0]).__name__}


@tool
def blocking(ctx: dict[str, Any]) -> str:
    """Say which thread this runs in."""
    ctx["thread"] = threading.current_thread() is threading.main_thread()
    return "done"


@tool(timeout_s=0.05)
async def endless() -> None:
    """Never end."""
    await asyncio.Event().wait()


@tool
async def refuse(why: Literal["rude", "bug"]) -> str:
    """Refuse."""
    if why == "rude":
        raise ToolFailure("Be polite.", hint="say please")
    raise KeyError("x")


@tool(in_slot=True)
def count_lines(path: str, skip: int = 0) -> dict[str, int]:
    """Count the lines of a file of the workspace."""
    import sys
    from pathlib import Path

    print("noise")
    print("more noise", file=sys.stderr)
    return {"lines": len(Path(path).read_text().splitlines()) - skip}


async def test_the_schema_follows_from_signature_and_docstring():
    function = order.openai_schema()["function"]
    assert (function["name"], function["description"]) == ("order", "Order goods.")
    parameters = function["parameters"]
    assert parameters["required"] == ["lines", "on"]
    assert parameters["additionalProperties"] is False
    assert "$defs" not in json.dumps(parameters)
    assert "title" not in json.dumps(parameters)
    assert parameters["properties"]["lines"] == {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"goods": {"type": "string"}, "amount": {"type": "number", "exclusiveMinimum": 0}},
            "required": ["goods", "amount"],
        },
        "description": "What to order, line by line.",
    }
    assert parameters["properties"]["on"] == {
        "type": "string",
        "format": "date",
        "description": "The day of delivery.",
    }
    assert parameters["properties"]["unit"] == {"type": "string", "enum": ["kg", "lb"], "default": "kg"}
    assert parameters["properties"]["note"]["description"] == "For the driver."


async def test_calls_of_the_model_and_of_scripts_are_checked_typed_timed_and_recorded(sandbox):
    state: dict[str, Any] = {}
    own = [order, blocking, endless, refuse, count_lines]
    async with SandboxTools(sandbox, ["code_execution"], own=own, own_context=state) as runtime:
        tools = Tools(runtime, sandbox)
        good = {"lines": [{"goods": "bread", "amount": 2}], "on": "2026-11-18"}
        assert await tools("order", **good) == {"lines": 1, "weekday": "Wed", "unit": "KG", "kind": "Line"}
        assert "amount" in (await tools("order", lines=[{"goods": "bread", "amount": -2}], on="2026-11-18"))["error"]
        assert "date" in (await tools("order", **{**good, "on": "never"}))["error"]
        assert tools.outcome.status is ToolStatus.INVALID
        assert await tools("blocking") == {"result": "done"}
        assert state["thread"] is False
        assert "stopped after 0.05 s" in (await tools("endless"))["error"]
        assert tools.outcome.status is ToolStatus.TIMEOUT
        assert await tools("refuse", why="rude") == {"error": "Be polite.", "hint": "say please"}
        assert (await tools("refuse", why="bug"))["error"] == "refuse failed: KeyError: 'x'"
        script = (
            "import hermes_tools as t\n"
            "print(t.order([{'goods': 'bread', 'amount': 1}], on='2026-11-19')['weekday'], t.blocking()['result'])"
        )
        assert (await tools.script(script)).split() == ["Thu", "done"]
        await sandbox.write_file("a.txt", "1\n2\n3\n")
        assert await tools("count_lines", path="a.txt", skip=1) == {"lines": 2}
        assert "No such file" in (await tools("count_lines", path="b.txt"))["error"]
        server = ScriptedServer(calls(call("order", good)), calls(call("order", {"on": 1})), says("done"))
        result = await HermesAgentLoop(server, runtime=runtime).run([{"role": "user", "content": "order"}])
        assert [(made.name, made.status) for made in result.tool_calls] == [("order", "ok"), ("order", "invalid")]
        assert result.metrics["tool_calls_schema_valid"] == 1
        assert state["orders"] == 3


async def numbers(json: int, copy: Annotated[Cat | Dog, Field(discriminator="kind")]) -> Any:
    """Count."""
    for number in range(json):
        yield {copy.kind: number}


@tool
def leave() -> None:
    """A library that thinks it is a program."""
    sys.exit(3)


async def test_functions_that_yield_or_leave_and_parameters_named_like_methods_are_tools(sandbox, recwarn):
    count_up = tool(name="count_up")(numbers)
    assert not any(issubclass(warning.category, UserWarning) for warning in recwarn)
    assert "$defs" not in json.dumps(count_up.schema)
    async with SandboxTools(sandbox, [], own=[count_up, leave]) as runtime:
        tools = Tools(runtime, sandbox)
        assert await tools("count_up", json=2, copy={"kind": "dog"}) == {"result": [{"dog": 0}, {"dog": 1}]}
        assert (await tools("leave"))["error"] == "leave failed: RuntimeError: it called sys.exit(3)"
        assert tools.outcome.status is ToolStatus.ERROR


def late_context(thing: str, ctx: Any) -> None:
    """Fine."""


def positional(thing: str, /) -> None:
    """Fine."""


def no_types(thing):
    """Fine."""


def no_docstring(thing: str) -> None:
    pass


def variadic(*things: str) -> None:
    """Fine."""


def odd_type(thing: threading.Lock) -> None:
    """Fine."""


def recursive(tree: Tree) -> None:
    """Fine."""


async def uses_json(thing: str) -> str:
    """Fine."""
    return json.dumps(thing)


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (no_types, {}, "no_types cannot be a tool: its parameter 'thing' has no type"),
        (no_docstring, {}, "no_docstring cannot be a tool: it has no docstring"),
        (variadic, {}, "variadic cannot be a tool: the model gives arguments by name.*variadic.*'things'"),
        (positional, {}, "positional cannot be a tool: the model gives arguments by name.*positional-only.*'thing'"),
        (late_context, {}, "late_context cannot be a tool: `ctx` must be its first parameter"),
        (odd_type, {}, "odd_type cannot be a tool: a parameter has a type that JSON cannot carry"),
        (recursive, {}, "recursive cannot be a tool: its type Tree holds itself"),
        (lambda: None, {}, "cannot be a tool: a name is"),
        (uses_json, {"in_slot": True}, "only a plain function"),
        (blocking.run, {"name": "x y"}, "'x y' cannot be a tool|x y cannot be a tool"),
    ],
)
async def test_what_cannot_be_a_tool_is_refused_in_one_sentence(function, options, said):
    with pytest.raises(ToolsetError, match=said):
        tool(**options)(function)


async def test_a_function_for_the_slot_stands_alone():
    def uses_module(text: str) -> str:
        """Fine."""
        return json.dumps(text)

    with pytest.raises(ToolsetError, match="it uses 'json' of its module; import or define it inside"):
        tool(in_slot=True)(uses_module)


async def test_names_are_used_once_and_only_tools_are_tools(sandbox):
    with pytest.raises(ToolsetError, match="two tools are called 'terminal'"):
        SandboxTools(sandbox, ["terminal"], own=[tool(name="terminal")(blocking_again)])
    with pytest.raises(ToolsetError, match="decorate the function with @tool"):
        SandboxTools(sandbox, ["terminal"], own=[blocking_again])


def blocking_again() -> str:
    """Fine."""
    return ""
