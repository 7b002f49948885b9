"""`@tool`: a function of an environment becomes a tool of the model.

The schema follows from the signature (pydantic types) and the docstring; what the model sends is validated into those
types before the function runs. A function runs in this process, a plain one in a thread; with `in_slot` its source is
sent to the rollout's slot and runs in the Python there.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import json
import keyword
import re
import shlex
import textwrap
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache
from types import CodeType
from typing import Any, overload

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from pydantic_core import to_jsonable_python

from agent_loop.tools.script.execute_code import script_source
from agent_loop.tools.tool import (
    CallContext,
    InvalidArguments,
    Tool,
    ToolFailure,
    ToolFunction,
    ToolsetError,
    outcome_of,
)
from agent_loop.turn.runtime import in_thread
from agent_loop.turn.tool_call import ToolOutcome
from sandbox_pool.errors import first_invalid

OWN = "own"
"""Toolset of tools that are not ours."""
MOST_OUTPUT_CHARS = 4_000_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)(?: \([^)]*\))?: *(.*)$")
_NO_PYTHON = 127
_IN_SLOT = """
import json, os, sys
result, job = os.fdopen(os.dup(1), "w"), json.loads(sys.stdin.buffer.read().decode("utf-8"))
os.dup2(2, 1)
sys.stdout = sys.stderr
sys.path[:] = [entry for entry in sys.path if entry] + [os.getcwd()]
space = {"__name__": "__tool__"}
exec(compile(job["source"], job["name"] + ".py", "exec"), space)
json.dump(space[job["name"]](**job["arguments"]), result, default=str)
result.flush()
"""
"""What the function prints goes to stderr: only what it returns is its result."""


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *, name: str | None = None, in_slot: bool = False, timeout_s: float | None = None, parallel_safe: bool = False
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    in_slot: bool = False,
    timeout_s: float | None = None,
    parallel_safe: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function, for `HermesAgentBaseEnv.tools` to return.

    A first parameter `ctx` is not the model's: it gets the `SandboxContext` of the rollout, with `item` and `state`.
    The docstring is the description; a section `Args:` describes the parameters. What the function returns is JSON; a
    value that is not an object becomes `{"result": value}`. Raise `ToolFailure` to tell the model what it did wrong.

    `in_slot` runs the source of a plain function in the slot, without `ctx`; it must import what it needs inside.
    `parallel_safe` calls may run at the same time as others of a turn. ToolsetError says why a function cannot be one.
    """

    def make(given: Callable[..., Any]) -> Tool:
        label = str(name or getattr(given, "__name__", ""))
        if not _NAME.fullmatch(label):
            raise ToolsetError(f"{label or given!r} cannot be a tool: a name is letters, digits and _, at most 64")
        takes_ctx, arguments = _arguments_model(given, label)
        if in_slot and takes_ctx:
            raise ToolsetError(f"{label} cannot be a tool in the slot: `ctx` exists on the host only")
        run = _slot_runner(given, label) if in_slot else _host_runner(given, takes_ctx)
        return Tool(
            schema={"name": label, "description": _description(given, label), "parameters": _schema(arguments, label)},
            toolset=OWN,
            run=_checked(run, arguments, label),
            parallel_safe=parallel_safe,
            script_parameters=script_parameters(label, _schema(arguments, label)),
            timeout_s=timeout_s,
        )

    return make if function is None else make(function)


def script_parameters(name: str, schema: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Parameters of the tool's function in scripts, required ones first; None when a script could not call it."""
    names = list(schema.get("properties", {}))
    required = set(schema.get("required", ()))
    writable = all(word.isidentifier() and not keyword.iskeyword(word) for word in (name, *names))
    if not writable or name.startswith("_") or name in _taken():
        return None
    return tuple(sorted(names, key=lambda word: word not in required))


@cache
def _taken() -> frozenset[str]:
    """Names that the module of a script's tools needs for itself."""
    tree = ast.parse(script_source("hermes_tools_base.py"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.alias)}
    return frozenset(names | set(dir(builtins)))


def _arguments_model(function: Callable[..., Any], label: str) -> tuple[bool, type[BaseModel]]:
    """Whether the function takes `ctx`, and a model of everything else it takes."""
    try:
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    except (TypeError, ValueError) as error:
        raise ToolsetError(f"{label} cannot be a tool: it has no signature ({error})") from error
    except NameError as error:
        raise ToolsetError(f"{label} cannot be a tool: {error}: its annotations may name global types only") from error
    takes_ctx = bool(parameters) and parameters[0].name == "ctx"
    said = _said_of_arguments(function)
    fields: dict[str, Any] = {}
    for parameter in parameters[takes_ctx:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            kind = f"{parameter.kind.description} parameter {parameter.name!r}"
            raise ToolsetError(f"{label} cannot be a tool: the model gives arguments by name, so it has no {kind}")
        if parameter.name == "ctx":
            raise ToolsetError(f"{label} cannot be a tool: `ctx` must be its first parameter")
        if parameter.annotation is parameter.empty:
            raise ToolsetError(f"{label} cannot be a tool: its parameter {parameter.name!r} has no type")
        if parameter.name.startswith(("_", "model_")):
            raise ToolsetError(f"{label} cannot be a tool: rename its parameter {parameter.name!r}")
        fields[parameter.name] = (parameter.annotation, _field(parameter, said))
    try:
        with warnings.catch_warnings():  # a parameter may be called `json` or `copy`, as methods of models are
            warnings.filterwarnings("ignore", message="Field name .* shadows an attribute", category=UserWarning)
            model = create_model(label, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
        model.model_json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUserError, NameError) as error:
        why = str(error).partition("\n")[0]
        raise ToolsetError(f"{label} cannot be a tool: a parameter has a type that JSON cannot carry: {why}") from error
    return takes_ctx, model


def _field(parameter: inspect.Parameter, said: Mapping[str, str]) -> Any:
    default = ... if parameter.default is parameter.empty else parameter.default
    # Given as None, it would hide the description of an annotation.
    return Field(default, description=said[parameter.name]) if parameter.name in said else Field(default)


def _schema(model: type[BaseModel], label: str) -> dict[str, Any]:
    """The model's schema as one object without titles and references: what models were trained to read."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def plain(node: Any, inside: tuple[str, ...] = ()) -> Any:
        if isinstance(node, list):
            return [plain(value, inside) for value in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            name = str(node["$ref"]).rsplit("/", 1)[-1]
            if name in inside:
                raise ToolsetError(f"{label} cannot be a tool: its type {name} holds itself")
            node = {**definitions[name], **{key: value for key, value in node.items() if key != "$ref"}}
            inside = (*inside, name)
        # `discriminator` points at definitions, which are gone; what it says stands in the alternatives as well.
        notes = {"title": str, "discriminator": dict}
        kept = {key: value for key, value in node.items() if not isinstance(value, notes.get(key, ()))}
        if "properties" in kept:  # a parameter may be called `title`
            kept["properties"] = {key: plain(value, inside) for key, value in node["properties"].items()}
        return {key: value if key in ("properties", "default") else plain(value, inside) for key, value in kept.items()}

    plain_schema: dict[str, Any] = plain(schema)
    return {"type": "object", "properties": {}, **plain_schema}


def _description(function: Callable[..., Any], label: str) -> str:
    text = _SECTION.split(inspect.getdoc(function) or "", maxsplit=1)[0].strip()
    if not text:
        raise ToolsetError(f"{label} cannot be a tool: it has no docstring, which is what tells the model what it does")
    return text


def _said_of_arguments(function: Callable[..., Any]) -> dict[str, str]:
    """What the section `Args:` of the docstring says of each parameter."""
    pieces = _SECTION.split(inspect.getdoc(function) or "")
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=False))
    text = next((sections[name] for name in ("Args", "Arguments", "Parameters") if name in sections), "")
    said: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(text.strip("\n")).splitlines():
        if found := _ARGUMENT.match(line):
            name, said[found[1]] = found[1], found[2]
        elif name and line.strip():
            said[name] = f"{said[name]} {line.strip()}".strip()
    return said


Runner = Callable[[CallContext, BaseModel], Awaitable[Any]]


def _checked(run: Runner, arguments: type[BaseModel], label: str) -> ToolFunction:
    """The tool's function: validates, runs, and makes JSON of what comes back."""

    async def checked(ctx: CallContext, given: dict[str, Any]) -> ToolOutcome:
        try:
            values = arguments.model_validate(given)
        except ValidationError as error:
            raise InvalidArguments(f"Invalid arguments for {label}: {first_invalid(error, arguments)}") from error
        returned = await run(ctx, values)
        if isinstance(returned, ToolOutcome):
            return returned
        plain = to_jsonable_python(returned, fallback=str)
        return outcome_of(plain if isinstance(plain, dict) else {"result": plain})

    return checked


def _host_runner(function: Callable[..., Any], takes_ctx: bool) -> Runner:
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    async def run(ctx: CallContext, values: BaseModel) -> Any:
        given = (ctx.own_context,) if takes_ctx else ()
        named = {name: getattr(values, name) for name in type(values).model_fields}
        try:
            if is_async:
                returned = await function(*given, **named)
            else:
                returned = await in_thread(lambda: function(*given, **named))
            if inspect.isawaitable(returned):
                returned = await returned
            return [value async for value in returned] if isinstance(returned, AsyncIterator) else returned
        except SystemExit as error:  # of a library that thinks it is a program: it would end the whole run
            raise RuntimeError(f"it called sys.exit({error.code!r})") from error

    return run


def _slot_runner(function: Callable[..., Any], label: str) -> Runner:
    source, name = _source(function, label), function.__name__

    async def run(ctx: CallContext, values: BaseModel) -> Any:
        job = {"source": source, "name": name, "arguments": values.model_dump(mode="json")}
        command = f'python=$(command -v python3 || command -v python) && exec "$python" -c {shlex.quote(_IN_SLOT)}'
        result = await ctx.sandbox.exec(
            f"( {command} || exit {_NO_PYTHON} )",
            timeout_s=ctx.config.max_timeout_s,
            cwd=ctx.workspace.start(),
            stdin=json.dumps(job).encode(),
            merge_stderr=False,
            max_output_chars=MOST_OUTPUT_CHARS,
            on_activity=ctx.while_running(label),
        )
        if result.timed_out:
            return outcome_of({"error": f"{label} was stopped after {result.duration_s:.0f} s."}, timed_out=True)
        if result.exit_code == _NO_PYTHON:
            raise ToolFailure(f"{label} needs Python, which this sandbox does not have.")
        if result.exit_code or result.truncation:
            last = result.stderr.strip().rsplit("\n", 1)[-1][:500]
            raise ToolFailure(f"{label} failed: {last or f'exit code {result.exit_code}'}")
        try:
            return json.loads(result.output)
        except ValueError as error:  # something of the agent's in the slot stood in for Python
            raise ToolFailure(f"{label} gave no result.") from error

    return run


def _source(function: Callable[..., Any], label: str) -> str:
    """The function alone, as text that runs without its module."""
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        raise ToolsetError(f"{label} cannot be a tool in the slot: only a plain function can be sent there")
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, ValueError, SyntaxError) as error:
        raise ToolsetError(f"{label} cannot be a tool in the slot: its source cannot be read ({error})") from error
    if not isinstance(tree, ast.FunctionDef):
        raise ToolsetError(f"{label} cannot be a tool in the slot: it is not a `def`")
    tree.decorator_list, tree.returns = [], None
    for argument in (*tree.args.args, *tree.args.kwonlyargs):
        argument.annotation = None
    if outer := sorted({*function.__code__.co_freevars, *(_loaded(function.__code__) & set(function.__globals__))}):
        raise ToolsetError(
            f"{label} cannot be a tool in the slot: it uses {outer[0]!r} of its module; import or define it inside"
        )
    return ast.unparse(tree)


def _loaded(code: CodeType) -> set[str]:
    """Global names that it reads. `inspect.getclosurevars` counts what it imports itself, and attributes, as such."""
    inner = (_loaded(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*inner)
