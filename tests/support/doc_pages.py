"""The pages of docs/reference that are made from the code: `python tests/support/doc_pages.py` writes them anew.

Settings come from the pydantic models, results from the dataclasses, commands from argparse; what a field means is its
docstring or description.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_origin

import yaml
from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from agent_loop.limits import Limits
from agent_loop.model.contract import Sampling, Segment
from agent_loop.outcome import Outcome
from agent_loop.records.record import AgentResult, RolloutRecord, SampledCall, ToolCallRecord, ToolError, TurnRecord
from agent_loop.turn.runtime import ToolStatus
from environments.apps.cli import main as cli
from environments.benchmarks.swe_bench import SweBenchConfig
from environments.code_tasks.code_env import CodeTasksConfig
from environments.config.settings import HermesAgentEnvConfig, RunConfig
from environments.harbor_tasks import HarborConfig
from environments.prompts import PromptsConfig
from environments.terminal_tasks.terminal_env import TerminalTasksConfig
from sandbox_pool.results import ExecResult, FileStat, HostAsked, Truncation
from sandbox_pool.spec import Mount, NetworkRules, SandboxSpec

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
MEANINGS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("field_meanings.yaml").read_text())
MADE = "<!-- Made by tests/support/doc_pages.py; a test compares. -->\n\n"

SETTINGS = f"""# Settings

{MADE}One YAML file holds a whole run ([tutorial](../tutorial.md)). Each setting can be given as a dotted flag too, such
as `--env.group_size 8` or `--openai.base_url http://127.0.0.1:9001`; a flag counts before the file. Unknown names are
refused with the nearest one. An environment of your own adds its settings below `env`.

`openai.base_url` is the root of the server, with or without `/v1`. Only for `server_type: openai` it is the base of the
chat endpoint as its maker gives it, and that mostly ends in `/v1`.
"""
OBJECTS = f"""# Results, field by field

{MADE}What rollouts and sandboxes hand back. All are dataclasses with these attributes; a rollout on disk is the JSON of
a [RolloutRecord](#rolloutrecord).
"""
COMMANDS = f"""# Commands

{MADE}`hermes-rl VERB --help` says the same. Exit codes: 0 done, 1 something is wrong or was not completed, 2 bad input
(one sentence says what), 130 interrupted.
"""


def attribute_docstrings(kind: type) -> dict[str, str]:
    """What stands under each attribute in the source, bases first."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):
            continue
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for field, text in itertools.pairwise(body):
            if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
                continue
            target = field.target if isinstance(field, ast.AnnAssign) else getattr(field, "targets", [None])[0]
            if isinstance(target, ast.Name):
                found[target.id] = inspect.cleandoc(str(text.value.value))
    return found


def meaning(kind: type, name: str, texts: dict[str, str]) -> str:
    return texts.get(name) or MEANINGS.get(f"{kind.__name__}.{name}") or MEANINGS.get(name, "")


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in lines) + "\n"


def type_name(annotation: Any) -> str:
    text = (
        annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    )
    text = re.sub(r"\b(?:typing|collections\.abc|pathlib(?:\._local)?|[a-z_]+(?:\.[a-z_0-9]+)+)\.", "", text)
    text = re.sub(r"Annotated\[(\w+), [^\]]*\]", r"\1", text)
    text = re.sub(r"Literal\[([^\]]*)\]", lambda found: " or ".join(found[1].split(", ")), text)
    text = re.sub(r"tuple\[(\w+), \.\.\.\]", r"list of \1", text)
    text = re.sub(r"Union\[([^\[\]]*)\]", lambda found: found[1].replace(", ", " or "), text)
    text = re.sub(r"Optional\[(.*)\]", r"\1, null", text)
    return text.replace(" | None", ", null").replace("'", "").replace("NoneType", "null")


def default_text(value: Any) -> str:
    if value is PydanticUndefined or value is dataclasses.MISSING:
        return "required"
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, SecretStr):
        return "`***`"
    text = {None: "null", True: "true", False: "false"}.get(value, value) if isinstance(value, bool | None) else value
    text = " ".join(str(text).split())
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`" if text else '`""`'


def models_in(kind: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """A model and those below it, each with the path that leads to it."""
    yield prefix, kind
    for name, field in kind.model_fields.items():
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                place = f"{name}.NAME" if getattr(field.annotation, "__origin__", None) is dict else name
                yield from models_in(inner, f"{prefix}.{place}" if prefix else place)


def is_section(annotation: Any) -> bool:
    """Whether a setting is nothing but the settings below it; a tuple, or a choice with plain values, has a row too."""
    inner = (annotation, *getattr(annotation, "__args__", ()))
    models = [part for part in inner if isinstance(part, type) and issubclass(part, BaseModel)]
    plain = any(get_origin(part) is Literal for part in inner) or get_origin(annotation) is tuple
    return bool(models) and not plain


def settings_table(prefix: str, kind: type[BaseModel], leave_out: set[str] = frozenset()) -> str:  # type: ignore[assignment]
    texts = attribute_docstrings(kind)
    rows = []
    for name, field in sorted(kind.model_fields.items()):
        if name in leave_out or is_section(field.annotation):
            continue
        default = field.default_factory() if field.default_factory is not None else field.default  # type: ignore[call-arg]
        path = f"{prefix}.{name}" if prefix else name
        rows.append(
            (
                f"`{path}`",
                type_name(field.annotation),
                default_text(default),
                field.description or meaning(kind, name, texts),
            )
        )
    return table(("setting", "type", "default", "meaning"), rows)


def settings_page() -> str:
    parts = [SETTINGS]
    seen: set[tuple[str, type]] = set()
    for prefix, kind in models_in(RunConfig, ""):
        if (prefix, kind) in seen:
            continue
        seen.add((prefix, kind))
        heading = f"`{prefix}`" if prefix else "The file"
        note = inspect.cleandoc(kind.__doc__ or "") if kind.__module__.split(".")[0] != "pydantic" else ""
        parts.append(f"\n## {heading}\n\n{note}\n\n{settings_table(prefix, kind)}")
    base = set(HermesAgentEnvConfig.model_fields)
    for name, kind in (
        ("terminal_tasks", TerminalTasksConfig),
        ("code_tasks", CodeTasksConfig),
        ("prompts", PromptsConfig),
        ("harbor", HarborConfig),
        ("swe_bench", SweBenchConfig),
    ):
        parts.append(f"\n## `env` of {name}\n\n{settings_table('env', kind, leave_out=base)}")
    return "".join(parts)


def fields_table(kind: type) -> str:
    texts = attribute_docstrings(kind)
    if issubclass(kind, BaseModel):
        return settings_table("", kind)
    rows = []
    for field in dataclasses.fields(kind):
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default  # type: ignore[misc]
        default = default_text(made) if isinstance(made, str | int | float | bool | list | tuple | dict | None) else ""
        rows.append((f"`{field.name}`", f"`{field.type}`", default, meaning(kind, field.name, texts)))
    for name, value in vars(kind).items():
        if isinstance(value, property):
            returns = inspect.signature(value.fget).return_annotation  # type: ignore[arg-type]
            rows.append((f"`{name}` (property)", f"`{returns}`", "", value.__doc__ or ""))
    return table(("field", "type", "default", "meaning"), rows)


def enum_table(kind: type[enum.Enum]) -> str:
    texts = attribute_docstrings(kind)
    trainable = hasattr(kind, "trainable")
    rows = [
        (f"`{member.value}`", *(["yes" if member.trainable else "no"] if trainable else []), meaning(kind, name, texts))  # type: ignore[attr-defined]
        for name, member in kind.__members__.items()
    ]
    return table(("value", *(["trainable"] if trainable else []), "meaning"), rows)


def objects_page() -> str:
    parts = [OBJECTS]
    dataclasses_ = (
        AgentResult,
        TurnRecord,
        ToolCallRecord,
        ToolError,
        Segment,
        RolloutRecord,
        SampledCall,
        Limits,
        Sampling,
    )
    for kind in (*dataclasses_, SandboxSpec, NetworkRules, Mount, HostAsked, ExecResult, Truncation, FileStat):
        parts.append(f"\n## {kind.__name__}\n\n{inspect.cleandoc(kind.__doc__ or '')}\n\n{fields_table(kind)}")
    for kind in (Outcome, ToolStatus):
        parts.append(f"\n## {kind.__name__}\n\n{inspect.cleandoc(kind.__doc__ or '')}\n\n{enum_table(kind)}")
    return "".join(parts)


def subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            first: dict[int, tuple[str, argparse.ArgumentParser]] = {}
            for name, inner in action.choices.items():
                first.setdefault(id(inner), (name, inner))  # an alias is the same parser under another name
            yield from first.values()


def flags_table(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        value = action.metavar or (" or ".join(map(str, action.choices)) if action.choices else action.dest.upper())
        takes = "" if action.nargs == 0 else f" {value}"
        words = f"`{', '.join(action.option_strings)}{takes}`" if action.option_strings else f"`{value}`"
        rows.append((words, action.help or MEANINGS.get(action.dest, "")))
    return table(("argument", "meaning"), rows) if rows else ""


def commands_page() -> str:
    parts = [COMMANDS]
    for name, line in cli.VERBS.items():
        verb = cli.load_verb(name)
        parser = dict(subcommands(cli.build_parser([name])))[name]
        parts.append(f"\n## {name}\n\n{line[0].upper()}{line[1:]}.\n\n    {verb.EXAMPLE}\n\n{flags_table(parser)}")
        for action, inner in subcommands(parser):
            for word, deeper in (("", inner), *((f" {word}", each) for word, each in subcommands(inner))):
                if rows := flags_table(deeper):
                    parts.append(f"\n### {name} {action}{word}\n\n{rows}")
    return "".join(parts)


PAGES = {"settings.md": settings_page, "results.md": objects_page, "commands.md": commands_page}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (FOLDER / page).write_text(make())
