"""For every kind: the reference solution earns 1.0, doing nothing and the usual cheats 0.0. Real bash, real files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from environments.scoring.verification import Verdict
from environments.terminal_tasks import TerminalTask, make_task
from environments.terminal_tasks.kinds import KINDS
from support.local_context import LocalContext

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

CASES = [
    pytest.param(kind.name, split, seed, marks=[needs_git] if kind.category in ("git", "patches") else [])
    for kind in KINDS.values()
    for split, seed in (("eval" if kind.held_out else "train", 1), ("eval", 2))
]
EVERY_KIND = [
    pytest.param(kind.name, marks=[needs_git] if kind.category in ("git", "patches") else []) for kind in KINDS.values()
]


async def play(task: TerminalTask, root: Path, commands: tuple[str, ...]) -> Verdict:
    ctx = LocalContext.create(root)
    await task.prepare(ctx)
    for command in commands:
        await ctx.exec(command, timeout_s=20)
    return await task.verify(ctx)


async def assert_only_work_pays(task: TerminalTask, root: Path) -> None:
    solved = await play(task, root / "solved", task.solution)
    assert solved == Verdict(1.0), f"{task.prompt}: {solved.failures}"
    idle = await play(task, root / "idle", ())
    assert idle.score == 0.0
    assert idle.failures


@pytest.mark.parametrize(("kind", "split", "seed"), CASES)
async def test_the_reference_solution_earns_everything_and_doing_nothing_earns_nothing(
    kind: str, split: str, seed: int, tmp_path: Path
) -> None:
    await assert_only_work_pays(make_task(kind, split, seed), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_it_is_so_for_many_seeds(kind: str, tmp_path: Path) -> None:
    for seed in range(100, 115):
        await assert_only_work_pays(make_task(kind, "eval", seed), tmp_path / str(seed))


@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_empty_files_deleted_files_and_echoed_prompts_earn_nothing(kind: str, tmp_path: Path) -> None:
    task = make_task(kind, "eval", 3)
    targets = sorted({str(path) for check in task.checks if (path := getattr(check, "path", None))})
    quoted = " ".join(f"'{path}'" for path in targets)
    make_all = f'for f in {quoted}; do mkdir -p "$(dirname "$f")"; : > "$f"; done' if targets else "true"
    cheats = {
        "empties": (make_all,),
        "echoes": (f"printf '%s\\n' 'done {task.id}' | tee {quoted} >/dev/null" if targets else "true",),
        "clears": ("find . -mindepth 1 -delete",),
    }
    if kind == "empty_file":
        del cheats["empties"]  # here an empty file is what was asked for, but only the one that was asked for
    for name, commands in cheats.items():
        verdict = await play(task, tmp_path / name, commands)
        assert verdict.score == 0.0, f"{name} passes for: {task.prompt}"


@pytest.mark.parametrize(
    "kind", ["copy_file", "sort_lines", "count_lines", "checksum", "jsonl_count", "log_top_address"]
)
async def test_the_answer_of_another_seed_earns_nothing(kind: str, tmp_path: Path) -> None:
    """Same files to write, but the content of a twin task: memorised answers do not transfer."""
    task, twin = make_task(kind, "train", 4), make_task(kind, "train", 5)
    await play(twin, tmp_path / "twin", twin.solution)
    target = task.checks[-1].path  # type: ignore[attr-defined]
    source = twin.checks[-1].path  # type: ignore[attr-defined]
    verdict = await play(task, tmp_path / "task", (f"cp {tmp_path}/twin/{source} {target}",))
    assert verdict.score == 0.0


async def test_touching_a_bystander_costs_the_score(tmp_path: Path) -> None:
    task = make_task("rename_file", "train", 7)
    (bystander,) = [path for path, _ in task.files if path not in task.prompt]
    verdict = await play(task, tmp_path, (*task.solution, f"echo more >> {bystander}"))
    assert verdict.score == 0.0
    assert bystander in verdict.failures[0]
