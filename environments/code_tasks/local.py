"""The problems that ship with the package: one YAML file each in `problems/`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from environments.code_tasks.cases import CaseTests, parse_cases
from environments.code_tasks.code_task import CodeTask
from environments.shell_text import heredoc


class _Loader(yaml.SafeLoader):
    """Safe YAML with `!tuple [..]` and `!set [..]` for values that YAML has not."""


def _construct(make: type) -> Callable[[yaml.SafeLoader, yaml.SequenceNode], Any]:
    return lambda loader, node: make(loader.construct_sequence(node, deep=True))


_Loader.add_constructor("!tuple", _construct(tuple))
_Loader.add_constructor("!set", _construct(set))


class Problem(BaseModel):
    """One problem file."""

    model_config = ConfigDict(extra="forbid")

    name: str
    kind: Literal["write", "fix"]
    category: str
    level: int = Field(ge=0, le=4)
    split: Literal["train", "eval"]
    module: str
    prompt: str
    starter: str | None = None
    """What the file holds at the start; for `fix` the version with the mistake."""
    solution: str
    cases: list[dict[str, Any]] = Field(min_length=3)


def to_task(problem: Problem) -> CodeTask:
    """The task that an environment hands out."""
    if problem.kind == "fix" and problem.starter is None:
        raise ValueError(f"problem {problem.name!r} is to be fixed but has no starter")
    return CodeTask(
        id=f"code:local:{problem.name}",
        kind=problem.kind,
        category=problem.category,
        level=problem.level,
        split=problem.split,
        prompt=problem.prompt.strip(),
        files=((problem.module, problem.starter),) if problem.starter is not None else (),
        module=problem.module,
        tests=CaseTests(parse_cases(problem.cases)),
        solution=(heredoc(problem.module, problem.solution),),
    )


@cache
def local_problems() -> tuple[Problem, ...]:
    """All problem files, by name."""
    folder = files("environments.code_tasks") / "problems"
    entries = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda e: e.name)
    return tuple(Problem.model_validate(yaml.load(entry.read_text("utf-8"), Loader=_Loader)) for entry in entries)


def local_tasks() -> list[CodeTask]:
    """The local set as tasks."""
    return [to_task(problem) for problem in local_problems()]
