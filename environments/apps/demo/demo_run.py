"""The demo itself: every policy rolls out the same tasks; the rollouts are stored, summed up and verified.

The real model comes twice: as it is, and with the adapter that `hermes-rl learn` made of it (ADAPTER.md says how). Its
groups are sampled one after another with fixed seeds, so that whoever runs the demo sees the same table.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from agent_loop.local_models.standin import StandIn, chatml_tokenizer
from agent_loop.local_models.standin.solver import WRITERS, solver
from agent_loop.model.backends.backend import GROUP
from agent_loop.model.backends.llamacpp import LlamaCppBackend
from agent_loop.model.backends.vllm import VllmBackend
from agent_loop.model.contract import ModelServer
from agent_loop.model.tokens.probe import probe_template
from agent_loop.records.against import Confirmation, confirm
from agent_loop.records.record import RolloutRecord
from agent_loop.records.verify import Report, verify
from environments.config.settings import ServerConfig
from environments.errors import UsageError, writing
from environments.models import ModelOpener, checked_options
from environments.rollouts.planning import first_messages
from environments.runs.report.html_page import build_report
from environments.runs.store import write_whole
from environments.sandboxes import Pool
from environments.terminal_tasks import TerminalTask, TerminalTasks
from environments.terminal_tasks.terminal_env import TerminalTasksConfig, TerminalTasksEnv
from sandbox_pool import SlotPool

ADAPTER = Path(__file__).with_name("adapter.gguf")
CONFIRMED_POSITIONS = 40
COLUMNS = ("policy", "n", "solved", "reward", "valid", "repaired", "malformed", "turns", "tokens")


@dataclass(frozen=True)
class DemoPlan:
    config: TerminalTasksConfig
    server: ServerConfig
    out: Path
    tasks: int
    with_model: bool = True
    model_s: float = 60.0
    """The real model starts no new group after this: a slow machine gets fewer rollouts, not a longer demo."""


async def run_demo(plan: DemoPlan, console: Console) -> int:
    """Run the demo; exit code 1 when a stored rollout is not exact."""
    check_folder(plan.out)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(SlotPool.from_config(plan.config.pool))
        tasks = demo_tasks(plan.config, plan.tasks)
        policies = await scripted_policies(stack, plan.config, pool, tasks)
        if plan.with_model:
            try:
                policies = [*await real_policies(stack, plan, pool, tasks), *policies]
            except (ModelMissing, ImportError) as error:
                console.print(f"real model: {error}; going on with the scripted policies", markup=False)
        with PolicyProgress(console, policies, plan.tasks, plan.config.group_size) as progress:
            records = await _roll_out(policies, tasks, progress, plan.model_s)
        rollouts, page = await asyncio.to_thread(_store, plan.out, records)
        console.print(final_table(records))
        if late := late_line(policies, records, plan):
            console.print(late, markup=False)
        console.print(outcomes_line(records), markup=False)
        console.print(pool_lines(pool.metrics.summary(), records))
        report = verify(rollouts.read_bytes().splitlines())
        confirmation = await _confirm(policies, records)
        for line in verdict_lines(report, confirmation, rollouts, page):
            console.print(line, markup=False)
        return 0 if _all_good(report, confirmation, records) else 1


def check_folder(out: Path) -> None:
    """UsageError when the rollouts could not be written there, or would take the place of another run's."""
    if any((out / name).exists() for name in ("groups.jsonl", "metrics.jsonl")):
        raise UsageError(f"{out} holds a run of process, evaluate or learn: choose another --out")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass


class ModelMissing(Exception):
    """The real model cannot run here; one sentence says why."""


@dataclass
class DemoPolicy:
    name: str
    env: TerminalTasksEnv
    scorer: LlamaCppBackend | None = None
    """The real model, to confirm what it sampled."""


def demo_tasks(config: TerminalTasksConfig, count: int) -> list[TerminalTask]:
    """The tasks that every policy gets: held out, so the adapter was not trained on them."""
    stream = TerminalTasks("eval", levels=config.levels, seed=config.seed)
    return [stream[index] for index in range(count)]


async def scripted_policies(
    stack: AsyncExitStack, config: TerminalTasksConfig, pool: Pool, tasks: list[TerminalTask]
) -> list[DemoPolicy]:
    """Scripted policies on stand-in servers: they get tool schemas instead of examples, and more turns."""
    sizes = {"max_agent_turns": 4, "max_token_length": 8192, "max_tokens_per_turn": 256}
    form = {"examples": [], "tools_in_prompt": True, "tool_call_parser": "hermes"}
    settings = config.model_copy(update={**form, **sizes})
    opener = ModelOpener(stack, settings.tool_call_parser, settings.tokenizer_name)
    solutions = {task.prompt: task.solution for task in tasks}
    policies = []
    for name, writer in WRITERS.items():
        server = await stack.enter_async_context(StandIn(solver(solutions, writer), keep_log=False))
        model = await opener.record(VllmBackend(server.url, model=name), chatml_tokenizer())
        policies.append(DemoPolicy(name, _env(f"{name} (scripted)", settings, pool, model)))
    return policies


async def real_policies(
    stack: AsyncExitStack, plan: DemoPlan, pool: Pool, tasks: Sequence[TerminalTask]
) -> list[DemoPolicy]:
    """The real model without and with the adapter; ModelMissing or ImportError says why it cannot run."""
    from agent_loop.local_models.cpu_model import CpuModel, CpuModelError, CpuModelMissing, UpdatableModel
    from agent_loop.local_models.cpu_model.shared_reading import common_prefix

    settings = plan.config.model_copy(update={"extra_body": {GROUP: plan.config.group_size}})
    options = checked_options(CpuModel, plan.server.options) | {"weights": "F16", "threads": 1}
    policies = []
    for name, adapter in ((plan.server.model_name, None), (f"{plan.server.model_name} trained", ADAPTER)):
        try:
            front = await stack.enter_async_context(UpdatableModel(**options, adapter=adapter))
        except (CpuModelMissing, CpuModelError) as error:
            raise ModelMissing(str(error)) from error
        opener = ModelOpener(
            stack, settings.tool_call_parser, settings.tokenizer_name, tools_in_prompt=settings.tools_in_prompt
        )
        recorder = await opener.record(LlamaCppBackend(front.url), front.model.tokenizer)
        env = _env(name, settings, pool, recorder)
        # What all prompts begin with is read once instead of for each group.
        template = probe_template(front.model.tokenizer)
        prompts = [first_messages(settings, env.format_prompt(task)) for task in tasks]
        await front.share_prefix(common_prefix(template.prompt_ids(prompt, []) for prompt in prompts))
        scorer = front.model.backend()
        stack.push_async_callback(scorer.close)
        policies.append(DemoPolicy(name, env, scorer))
    return policies


def _env(name: str, config: TerminalTasksConfig, pool: Pool, model: ModelServer) -> TerminalTasksEnv:
    env = TerminalTasksEnv(config, [ServerConfig(server_type="standin", model_name=name)], pool=pool, model=model)
    env.rollouts.mode = "process"
    return env


async def _roll_out(
    policies: list[DemoPolicy], tasks: list[TerminalTask], progress: PolicyProgress, model_s: float
) -> list[RolloutRecord]:
    """All policies at the same time, each a few groups at a time."""
    began = time.monotonic()

    async def all_groups(policy: DemoPolicy) -> list[RolloutRecord]:
        at_once = asyncio.Semaphore(policy.env.config.groups_at_once)

        async def group(index: int, task: TerminalTask) -> list[RolloutRecord]:
            async with at_once:
                if policy.scorer is not None and time.monotonic() - began > model_s:
                    return []
                result = await policy.env.rollouts.run_group(task, index, policy.env.config.group_size, tag=policy.name)
            progress.group_done(policy, list(result.records()))
            return list(result.records())

        return [r for part in await asyncio.gather(*(group(i, t) for i, t in enumerate(tasks))) for r in part]

    return [record for part in await asyncio.gather(*(all_groups(policy) for policy in policies)) for record in part]


def _store(out: Path, records: list[RolloutRecord]) -> tuple[Path, Path]:
    rollouts, page = out / "rollouts.jsonl", out / "report.html"
    lines = [record.to_json() + b"\n" for record in records]
    write_whole(rollouts, b"".join(lines))
    # The page takes its records apart, so it gets copies.
    write_whole(page, build_report(map(RolloutRecord.from_json, lines), title="hermes-rl demo").encode())
    return rollouts, page


async def _confirm(policies: list[DemoPolicy], records: list[RolloutRecord]) -> Confirmation | None:
    """Have the real model confirm the logprobs of what it sampled."""
    for policy in policies:
        if policy.scorer is not None:
            name = policy.env.policy_name
            own = [(line, r) for line, r in enumerate(records, 1) if r.policy == name and r.segments]
            if own:
                return await confirm(own, policy.scorer, positions=CONFIRMED_POSITIONS)
    return None


def _all_good(report: Report, confirmation: Confirmation | None, records: list[RolloutRecord]) -> bool:
    confirmed = confirmation is None or confirmation.violation is None
    return report.ok and confirmed and any(record.trainable for record in records)


class PolicyProgress:
    """A bar per policy on a terminal; in a pipe a line when a policy is done."""

    def __init__(self, console: Console, policies: Sequence[DemoPolicy], groups: int, group_size: int) -> None:
        self._console = console
        self._live = console.is_terminal
        self._scores: defaultdict[str, list[float]] = defaultdict(list)
        self._bars = Progress(
            TextColumn("{task.fields[policy]:<20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._left = {policy.name: groups for policy in policies}
        for policy in policies:
            total = groups * group_size
            self._tasks[policy.name] = self._bars.add_task("", total=total, policy=policy.env.policy_name, score="")

    def __enter__(self) -> Self:
        if self._live:
            self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._bars.stop()

    def group_done(self, policy: DemoPolicy, records: Sequence[RolloutRecord]) -> None:
        scores = self._scores[policy.name]
        scores += [record.verifier_score for record in records if record.verifier_score is not None]
        solved = f"solved {fmean(scores):.0%}" if scores else ""
        self._bars.update(self._tasks[policy.name], advance=len(records), score=solved)
        self._left[policy.name] -= 1
        if not self._live and self._left[policy.name] == 0:
            self._console.print(f"{policy.env.policy_name}: {len(scores)} rollouts, {solved}", markup=False)


def final_table(records: Sequence[RolloutRecord]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    by_policy: defaultdict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        by_policy[record.policy].append(record)
    for policy, own in by_policy.items():
        table.add_row(policy, *_row(own))
    return table


def _row(records: Sequence[RolloutRecord]) -> list[str]:
    trained = [record for record in records if record.trainable]
    attempted = _total(trained, "tool_calls_attempted")
    return [
        str(len(records)),
        _mean([record.verifier_score for record in trained], ".0%"),
        _mean([record.score for record in trained], "+.2f"),
        f"{_total(trained, 'tool_calls_schema_valid') / attempted:.0%}" if attempted else "-",
        f"{_total(trained, 'tool_calls_repaired'):.0f}",
        f"{_total(trained, 'tool_calls_malformed'):.0f}",
        _mean([record.metrics.get("turns") for record in trained], ".1f"),
        f"{_total(trained, 'sampled_tokens'):,.0f}",
    ]


def _total(records: Sequence[RolloutRecord], metric: str) -> float:
    return sum(record.metrics.get(metric, 0.0) for record in records)


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return format(fmean(known), form) if known else "-"


def late_line(policies: Sequence[DemoPolicy], records: Sequence[RolloutRecord], plan: DemoPlan) -> str | None:
    """Why the table is not the one that everybody sees; None when it is."""
    whole = plan.tasks * plan.config.group_size
    made = Counter(record.policy for record in records)
    late = [policy.name for policy in policies if policy.scorer is not None and made[policy.env.policy_name] < whole]
    if not late:
        return None
    return f"{' and '.join(late)}: {plan.model_s:g} s were not enough for {whole} rollouts; --seconds gives more time"


def outcomes_line(records: Sequence[RolloutRecord]) -> str:
    outcomes = Counter(record.outcome for record in records)
    return "outcomes: " + ", ".join(f"{count} {name}" for name, count in outcomes.most_common())


def pool_lines(metrics: Mapping[str, Any], records: Sequence[RolloutRecord]) -> str:
    levels = Counter(record.isolation for record in records if record.isolation)
    times = ((name, metrics[f"{name}_ms"]) for name in ("acquire", "exec", "reset"))
    parts = [f"{name} p50 {time['p50']:.1f} / p95 {time['p95']:.1f} ms" for name, time in times]
    return f"slots: {', '.join(parts)}\nisolation: {', '.join(levels) or 'none'}"


def verdict_lines(report: Report, confirmation: Confirmation | None, rollouts: Path, page: Path) -> list[str]:
    checks = len(report.checked)
    exact = "exact" if report.ok else f"NOT EXACT: {report.violations[0]}"
    lines = [f"verify: {report.rollouts} rollouts, {checks} checks each: {exact}"]
    if confirmation is not None:
        said = confirmation.violation or f"confirmed (mean difference {confirmation.mean:.3f})"
        lines.append(f"verify --against the model itself, {len(confirmation.differences)} positions: {said}")
    return [*lines, f"rollouts: {rollouts}", f"page:     {page}"]
