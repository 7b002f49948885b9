"""`swe_bench`: issues of repositories, solved in the repository's image, graded by SWE-bench's own package.

A row is one of SWE-bench 5's datasets: the issue, the image with the repository in /testbed, the right patch, a script
that runs the tests, and which of them must pass then. As in SWE-bench only the agent's changes to the repository count:
its diff is applied in a slot of its own that no agent ever touched, and the tests run there. So nothing else that it
left, such as a git that restores other tests, is part of the judgement.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from environments.base import AgentResult, SandboxContext, Score, ToolContext
from environments.benchmarks.packages import needed, prompts
from environments.dataset_rows import dataset_rows
from environments.errors import ConfigError
from environments.listed_items import Item, ListedItemsConfig, ListedItemsEnv
from environments.scoring.verification import AgentFault, CheckTimeout
from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)

INSTALL = "pip install 'hermes-rl[swe-bench]'"
TESTBED = "/testbed"
PATCH = "/tmp/patch.diff"
MOST_PATCH_BYTES = 10 << 20
MOST_SOLUTION_BYTES = 48_000
"""The stand-in plays a patch as one command, which has to fit into its turn."""
NEEDED = (
    *("instance_id", "repo", "version", "problem_statement", "patch", "image"),
    *("eval_script", "log_parser", "eval_type", "FAIL_TO_PASS", "PASS_TO_PASS"),
)
_GIT = "git -c core.fsmonitor=false -c core.fileMode=false -c core.hooksPath=/dev/null"


class SweBenchConfig(ListedItemsConfig):
    """Which rows, and where their images are."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    dataset_name: str | None = Field(
        default=None,
        validation_alias="dataset",
        description="Rows as SWE-bench 5 has them: a .jsonl or .parquet file, or a name for `datasets`.",
    )
    dataset_split: str = Field(default="test", description="Split of a dataset by name.")
    image: str = Field(
        default="{image}",
        description="Where images are; {image} and {instance_id} are the row's: `oci:DIR/{instance_id}:1`.",
    )
    test_timeout_s: float = Field(default=1800.0, gt=0, description="Seconds the tests of a row may take.")
    system_prompt: str | None = prompts()["swe_bench"]
    max_agent_turns: int = Field(default=100, ge=1)


class SweBenchEnv(ListedItemsEnv):
    """Issues of real repositories."""

    name = "swe_bench"
    env_config_cls = SweBenchConfig
    config: SweBenchConfig

    def load_items(self, config: SweBenchConfig) -> list[Item]:
        self.harness = needed("swebench.harness.run_evaluation", INSTALL)
        if not config.dataset_name:
            raise ConfigError("env.dataset is missing: a .jsonl or .parquet file, or a name that `datasets` knows")
        rows = dataset_rows(config.dataset_name, config.dataset_split)
        self.heads: dict[str, str] = {}
        self.specs = {}
        for number, row in enumerate(rows, 1):
            where = f"{config.dataset_name}, row {number}"
            if missing := [name for name in NEEDED if row.get(name) is None]:
                raise ConfigError(f"{where} has no {missing[0]!r}: rows are those of SWE-bench 5, older ones lack some")
            if row.get("image_assets") not in (None, "", "{}", {}):
                raise ConfigError(f"{where}: {row['instance_id']} has image_assets, which are not supported")
            self.specs[str(row["instance_id"])] = needed("swebench.harness.utils", INSTALL).make_test_spec(row)
        if not rows or len(self.specs) < len(rows):
            raise ConfigError(f"env.dataset {config.dataset_name}: " + ("two rows are the same" if rows else "no rows"))
        return [{**row, "id": str(row["instance_id"]), "category": str(row["repo"])} for row in rows]

    def format_prompt(self, item: Item) -> str:
        return str(item["problem_statement"])

    def spec(self, item: Item) -> SandboxSpec:
        image = self.config.image.replace("{image}", item["image"]).replace("{instance_id}", item["id"])
        return self.config.sandbox.model_copy(update={"image": image, "workdir": TESTBED})

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> Score:
        patch = await self._patch_of(item, ctx)
        await ctx.close()  # a verifier that holds one slot and waits for another could wait for ever
        if not patch.strip():
            return _score({})
        async with self._untouched(item) as fresh:
            await fresh.write_file(PATCH, patch)
            for command in self.harness.GIT_APPLY_CMDS:
                if (await fresh.exec(f"{command} {PATCH}")).exit_code == 0:
                    break
            else:
                return _score({})
            await fresh.write_file("/eval.sh", self.specs[item["id"]].eval_script)
            try:
                done = await fresh.exec("/bin/bash /eval.sh", timeout_s=self.config.test_timeout_s)
            except CheckTimeout as error:
                raise AgentFault(f"the tests of {item['id']} take too long: {error}") from error
        return _score(await asyncio.to_thread(self._judged, item["id"], done.output))

    async def _patch_of(self, item: Item, ctx: ToolContext) -> bytes:
        """What the agent changed, against the commit that the image came with: its own git may say anything."""
        if item["id"] not in self.heads:
            async with self._untouched(item) as fresh:
                head = await fresh.exec("git rev-parse HEAD", merge_stderr=False)
            if head.exit_code != 0:
                raise ConfigError(f"{item['id']}: its image has no git repository in {TESTBED}")
            self.heads[item["id"]] = head.output.strip()
        made = f"{_GIT} add -A && {_GIT} diff --cached --binary --no-ext-diff --no-textconv {self.heads[item['id']]}"
        done = await ctx.exec(f"({made}) > {PATCH}")
        if done.exit_code != 0:
            raise AgentFault(f"the agent's changes cannot be read: {done.output.strip()[-200:]}")
        return await ctx.read_file(PATCH, max_bytes=MOST_PATCH_BYTES)

    @asynccontextmanager
    async def _untouched(self, item: Item) -> AsyncIterator[SandboxContext]:
        """A slot as the agent's was before it came."""
        async with self.opened_pool().lease(f"swe-bench-{item['id']}", self.spec(item)) as sandbox:
            yield SandboxContext(sandbox)

    def _judged(self, name: str, output: str) -> dict[str, Any]:
        """The report. Where the parser of a repository's logs fails on these, and on no others, it was the agent's."""
        try:
            return self._report(name, output)
        except Exception as error:
            self._report(name, "")
            raise AgentFault(f"what the tests of {name} printed cannot be read: {error}") from error

    def _report(self, name: str, output: str) -> dict[str, Any]:
        """SWE-bench's own judgement of what the tests printed. Blocking."""
        prediction = {"instance_id": name, "model_name_or_path": "", "model_patch": "given"}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "test_output.txt"
            path.write_text(output, encoding="utf-8")
            report = self.harness.get_eval_report(self.specs[name], prediction, str(path), include_tests_status=True)
        found: dict[str, Any] = report[name]
        return found

    def solution(self, item: Item) -> Sequence[str | Mapping[str, Any]]:
        data = base64.b64encode(str(item["patch"]).encode()).decode()
        if len(data) > MOST_SOLUTION_BYTES:
            log.warning("%s: the stand-in cannot play a patch of %d bytes", item["id"], len(item["patch"]))
            return []
        return [f"cd {TESTBED} && base64 -d <<< {data} | git apply"]


def _score(report: Mapping[str, Any]) -> Score:
    """1 when all named tests pass, else 0; the shares of both kinds are kept beside it."""
    kinds = report.get("tests_status", {})
    parts = {}
    for kind in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        good, bad = (len(kinds.get(kind, {}).get(how, ())) for how in ("success", "failure"))
        if good + bad:
            parts[kind.lower()] = good / (good + bad)
    return Score(float(report.get("resolved", False)), components=parts)


if __name__ == "__main__":
    SweBenchEnv.cli()
