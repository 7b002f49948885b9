"""`prompts`: a task set from a file, one rollout group per row. What hermes-agent's batch runner did, and scored.

A row holds the prompt, and may hold `id`, `category`, `files` (path -> text, or {"base64": ...}), `image` (root of its
slot), `answer` (what the agent should say last), `check` (a command that succeeds when the work is right),
`check_files` (written before the check, over whatever the agent left there), `user` (whom `env.user` plays) and
`solution` (what the stand-in plays). A row with neither `answer` nor `check` scores 1 when the agent ends by itself.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from agent_loop.local_models.standin.solver import checked_steps
from environments.base import AgentResult, ToolContext, Verdict
from environments.dataset_rows import dataset_rows
from environments.errors import ConfigError, warn_of_slips
from environments.listed_items import ListedItemsConfig, ListedItemsEnv
from sandbox_pool.errors import did_you_mean
from sandbox_pool.spec import SandboxSpec

Row = dict[str, Any]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class PromptsConfig(ListedItemsConfig):
    """Where the rows are, and how to read them."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    dataset_name: str | None = Field(
        default=None,
        validation_alias="dataset",
        description="A .jsonl, .jsonl.gz or .parquet file, or a name for `datasets`; also `dataset`.",
    )
    answer_field: str = Field(default="answer", description="Column that holds the expected answer.")
    match: Literal["exact", "contains", "number"] = Field(
        default="exact",
        description="How the last message is compared with the answer: the same text but for case and space, holding "
        "it, or ending in the same number.",
    )
    check_timeout_s: float = Field(default=120.0, gt=0, description="Seconds a row's `check` may take.")


class PromptsEnv(ListedItemsEnv):
    """Rows of a dataset as tasks."""

    name = "prompts"
    env_config_cls = PromptsConfig
    config: PromptsConfig

    def load_items(self, config: PromptsConfig) -> list[Row]:
        return _rows(config)

    def format_prompt(self, item: Row) -> str | list[dict[str, Any]]:
        prompt = item[self.config.prompt_field]
        return prompt if isinstance(prompt, str) else list(prompt)

    def files(self, item: Row) -> Mapping[str, bytes | str]:
        return _contents(item.get("files"), item)

    def spec(self, item: Row) -> SandboxSpec:
        image = item.get("image")
        return self.config.sandbox.model_copy(update={"image": str(image)}) if image else self.config.sandbox

    async def compute_reward(self, item: Row, result: AgentResult, ctx: ToolContext) -> float | Verdict:
        wanted, check = item.get(self.config.answer_field), item.get("check")
        failures = []
        if wanted is not None and not matches(result.final_answer, str(wanted), self.config.match):
            failures.append("the answer is another one")
        if check and not failures:
            await ctx.put_tests(_contents(item.get("check_files"), item))
            done = await ctx.exec(str(check), timeout_s=self.config.check_timeout_s)
            if done.exit_code != 0:
                failures.append(f"the check ended with {done.exit_code}: {done.output.strip()[-200:]}")
        if wanted is None and not check:
            return float(result.finished_naturally)
        return Verdict.of(failures)

    def solution(self, item: Row) -> Sequence[str | Mapping[str, Any]]:
        wanted = item.get(self.config.answer_field)
        return item.get("solution") or ([] if wanted is None else [{"content": str(wanted)}])


def _rows(config: PromptsConfig) -> list[Row]:
    source, field = config.dataset_name, config.prompt_field
    if not source:
        raise ConfigError("env.dataset is missing: a .jsonl or .parquet file, or a name that `datasets` knows")
    rows = dataset_rows(source, config.dataset_split)
    if not rows:
        raise ConfigError(f"env.dataset {source}: there are no rows")
    for number, row in enumerate(rows, 1):
        prompt = row.get(field)
        if field not in row:
            raise ConfigError(
                f"{source}, row {number}: no column {field!r} (env.prompt_field); {did_you_mean(field, row)}"
            )
        if not prompt or not isinstance(prompt, str | list):
            raise ConfigError(f"{source}, row {number}: {field!r} is not a text or a list of messages")
        for place, message in enumerate(prompt if isinstance(prompt, list) else (), 1):
            if (
                not isinstance(message, Mapping)
                or not message.get("role")
                or not {"content", "tool_calls"} & {*message}
            ):
                raise ConfigError(f"{source}, row {number}: message {place} of {field!r} has no `role` or no `content`")
        if row.get("id") is None:
            row["id"] = f"{Path(source).stem}-{number}"
        if row.get("solution"):
            try:
                checked_steps(row["solution"])
            except ValueError as error:
                raise ConfigError(f"{source}, row {number}: `solution`: {error}") from None
        _contents(row.get("files"), row)
        _contents(row.get("check_files"), row)
    name, times = Counter(str(row["id"]) for row in rows).most_common(1)[0]
    if times > 1:
        raise ConfigError(f"env.dataset {source}: {times} rows have the same `id`, {name}")
    ours = {config.answer_field, "id", "category", "files", "image", "check", "check_files", "user", "solution"}
    warn_of_slips({column for row in rows for column in row} - {field}, ours, f"env.dataset {source}")
    return rows


def _contents(files: Any, row: Row) -> dict[str, bytes | str]:
    """Files of a row. Parquet gives every row the columns of all: a null is no file."""
    if files is None:
        return {}
    if not isinstance(files, Mapping):
        raise ConfigError(f"row {row['id']}: `files` is not an object of paths and contents")
    return {str(path): _content(data, row) for path, data in files.items() if data is not None}


def _content(data: Any, row: Row) -> bytes | str:
    if isinstance(data, str | bytes):
        return data
    try:
        return base64.b64decode(data["base64"], validate=True)
    except (TypeError, KeyError, binascii.Error) as error:
        raise ConfigError(f'row {row["id"]}: a file is a text or {{"base64": ...}}, not {data!r:.60}') from error


def matches(said: str, wanted: str, how: Literal["exact", "contains", "number"]) -> bool:
    """Whether what the agent said last is the expected answer."""
    if how == "number":
        found, right = _NUMBER.findall(said), _NUMBER.findall(wanted)
        return bool(found and right) and _value(found[-1]) == _value(right[-1])
    given, expected = (" ".join(text.split()).casefold() for text in (said, wanted))
    return expected in given if how == "contains" else expected == given


def _value(number: str) -> float:
    return float(number.replace(",", ""))


if __name__ == "__main__":
    PromptsEnv.cli()
