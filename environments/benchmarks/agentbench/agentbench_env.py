"""`agentbench_os`: the shell tasks of AgentBench's OS domain, with the data of inspect-evals.

A task is either a question about the system, answered by the agent's last message, or a change to it, which a check
command looks at. The right answer to a question is worked out in a slot of its own, laid out as the agent's was and
never touched by it, with the benchmark's example solution; its check script runs there, too. A change is checked in a
fork of everything that the agent wrote.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from environments.base import AgentResult, SandboxContext, ToolContext, Verdict
from environments.benchmarks.packages import folder_of, prompts
from environments.config.settings import Verification
from environments.errors import ConfigError
from environments.listed_items import Item, ListedItemsConfig, ListedItemsEnv
from sandbox_pool.spec import SandboxSpec

INSTALL = "pip install 'hermes-rl[agentbench-os]'"
HOME = "/home/agent"
STAGED = "/tmp/agent_bench_scripts"
CHECK_TIMEOUT_S = 600.0
SAME_EACH_TIME = """
unset RANDOM; RANDOM=7  # a subshell would draw seeds of its own
cat() {
  [ "$*" = /dev/urandom ] || { command cat "$@"; return; }
  python3 -c 'import random, sys; r = random.Random(3)
while True: sys.stdout.buffer.write(r.randbytes(4096))'
}
"""
"""Before an init that draws random bytes: the slot in which the right answer is worked out must hold the same ones."""
FILES = {"test": "agent_bench_os_test.json", "dev": "agent_bench_os.json"}


class AgentBenchConfig(ListedItemsConfig):
    """Which tasks, and what they run in."""

    image: str | None = Field(
        default=None,
        description="Root of the slots: a Debian with python3, procps, sudo and passwd; None: this machine's own.",
    )
    split: Literal["test", "dev"] = Field(default="test", description="119 tasks, or 26 for development.")
    scripts: Path | None = Field(
        default=None,
        description="data/os_interaction/scripts of an AgentBench checkout, for its own init scripts; None: ours.",
    )
    system_prompt: str | None = prompts()["agentbench_os"]
    verification: Verification = Field(
        default="layer", description="As in other environments; the tasks change any file, so the whole layer."
    )
    max_agent_turns: int = Field(default=30, ge=1)


class AgentBenchEnv(ListedItemsEnv):
    """AgentBench's OS tasks."""

    name = "agentbench_os"
    env_config_cls = AgentBenchConfig
    config: AgentBenchConfig

    def load_items(self, config: AgentBenchConfig) -> list[Item]:
        self.data = folder_of("inspect_evals", INSTALL) / "agent_bench" / "data"
        self.init_files = _init_files(config.scripts)
        rows = json.loads((self.data / FILES[config.split]).read_text("utf-8"))
        return [_item(row) for row in rows]

    def format_prompt(self, item: Item) -> str:
        return str(item["description"])

    def spec(self, item: Item) -> SandboxSpec:
        base = self.config.sandbox
        return base.model_copy(
            update={"image": self.config.image, "workdir": HOME, "env": {**base.env, "HOME": HOME}, "user": None}
        )

    async def prepare(self, item: Item, ctx: SandboxContext) -> None:
        if "bin/find" in json.dumps(item):
            await _must(ctx, f"mkdir -p {HOME}/bin && cp /usr/bin/find {HOME}/bin/find")
        if not item["at_start"]:
            await self._lay_out(item, ctx)

    async def start(self, item: Item, ctx: SandboxContext) -> None:
        """Processes do not outlive `prepare`: what starts some runs here."""
        if item["at_start"]:
            await self._lay_out(item, ctx)

    async def _lay_out(self, item: Item, ctx: SandboxContext) -> None:
        """Run the task's init. What it would install is in the image already, so its `apt` does nothing."""
        for number, step in enumerate(item["init"]):
            code = self.init_files[step["file"]] if "file" in step else step["code"]
            path = f"/tmp/init_{number}.sh"
            first = SAME_EACH_TIME if "/dev/urandom" in code else "RANDOM=3"
            await ctx.write_file(path, f"apt() {{ :; }}\n{first}\n{code}\n")
            await _must(ctx, f"bash {path} > /dev/null 2>&1 < /dev/null; rm -f {path}")

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> Verdict:
        check = item["evaluation"].get("check")
        if check is None:
            right = str(item["evaluation"]["match"])
            return Verdict.of([] if result.final_answer.strip() == right else ["the answer is another one"])
        if isinstance(check, list) and len(check) > 1:
            return await self._answered(item, result.final_answer)
        if isinstance(check, dict) and "file" in check:
            await ctx.put_tests({f"{STAGED}/check.sh": self._script(check["file"])})
            command = f"bash {STAGED}/check.sh"
        else:
            command = check["code"] if isinstance(check, dict) else check[0]
        done = await ctx.exec(_login(command), timeout_s=CHECK_TIMEOUT_S)
        return Verdict.of([] if done.exit_code == 0 else [f"the check ended with {done.exit_code}"])

    async def _answered(self, item: Item, answer: str) -> Verdict:
        async with self._untouched(item) as ctx:
            right = item["evaluation"].get("match")
            if right is None:
                done = await ctx.exec(_login(_code(item["evaluation"]["example"])), timeout_s=CHECK_TIMEOUT_S)
                right = done.output.strip()
            for step in filter(None, item["evaluation"]["check"]):
                await ctx.write_file(f"{STAGED}/check.py", self._script(step["file"]))
                words = shlex.join(["python3", f"{STAGED}/check.py", answer, str(right)])
                if (await ctx.exec(words, timeout_s=CHECK_TIMEOUT_S)).exit_code != 0:
                    return Verdict.of(["the answer is another one"])
        return Verdict.of([])

    @asynccontextmanager
    async def _untouched(self, item: Item) -> AsyncIterator[SandboxContext]:
        """A slot as the agent's was before it came."""
        async with self.opened_pool().lease(f"agentbench-answer-{item['id']}", self.spec(item)) as sandbox:
            ctx = SandboxContext(sandbox)
            await self.prepare(item, ctx)
            await self.start(item, ctx)
            yield ctx

    def _script(self, name: str) -> str:
        return (self.data / "scripts" / name).read_text("utf-8")

    def solution(self, item: Item) -> Sequence[str | Mapping[str, Any]]:
        """The example; a question is answered with what it prints."""
        example = item["evaluation"].get("example")
        if isinstance(example, dict) and "file" in example:
            return [self._script(example["file"])]
        if example is None:
            return [{"content": str(item["evaluation"]["match"])}]
        check = item["evaluation"].get("check")
        answers = [{"content": None}] if isinstance(check, list) and len(check) > 1 else []
        return [_code(example), *answers]


def _init_files(checkout: Path | None) -> dict[str, str]:
    if checkout is None:
        folder = files("environments.benchmarks.agentbench") / "init"
        return {f"init/{entry.name}": entry.read_text("utf-8") for entry in folder.iterdir()}
    found = {f"init/{path.name}": path.read_text("utf-8") for path in checkout.glob("*/init/*.sh")}
    if not found:
        raise ConfigError(f"env.scripts: there is no */init/*.sh in {checkout}")
    return {name: _at_home(text) for name, text in found.items()}


def _item(row: Mapping[str, Any]) -> Item:
    row = {key: _at_home(value) for key, value in row.items()}
    create = row.get("create") if isinstance(row.get("create"), dict) else {}
    assert isinstance(create, dict)
    given = create.get("init") or []
    steps = given if isinstance(given, list) else [given]
    return {
        "id": str(row["id"]),
        "category": ",".join(row.get("labels", [])),
        "description": row["description"],
        "evaluation": row["evaluation"],
        "init": [{"code": step} if isinstance(step, str) else step for step in steps],
        "at_start": bool(create.get("init_at_start")),
    }


def _at_home(value: Any) -> Any:
    """AgentBench's /root and /usr are the agent's home here, as in inspect-evals."""
    if isinstance(value, dict):
        return {key: _at_home(one) for key, one in value.items()}
    return value.replace("/root", HOME).replace("/usr", HOME) if isinstance(value, str) else value


def _code(example: Any) -> str:
    return str(example["code"] if isinstance(example, dict) else example)


def _login(command: str) -> str:
    return f"bash --login -c {shlex.quote(f'cd {HOME} && {command}')}"


async def _must(ctx: SandboxContext, command: str) -> None:
    done = await ctx.exec(command)
    if done.exit_code != 0:
        raise RuntimeError(f"{command[:100]} ended with {done.exit_code}: {done.output.strip()[-200:]}")


if __name__ == "__main__":
    AgentBenchEnv.cli()
