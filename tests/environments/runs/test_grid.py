"""Several models, seeds and settings in one evaluation, and the budget that they share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from environments.base import ServerConfig
from environments.config.settings import BudgetSettings
from environments.errors import ConfigError, UsageError
from environments.runs.batch import evaluate_run, process_run
from environments.runs.comparison import read_run
from environments.runs.grid import Combination, combinations, evaluate_grid, servers_of
from support.env_pool import DirectoryPool
from support.env_tasks import NumberEnv, right, sometimes_right, standin_model


@pytest.fixture
def pool() -> Iterator[DirectoryPool]:
    made = DirectoryPool(slots=16)
    yield made
    made.close()


PRICED = ServerConfig(server_type="standin", usd_per_mtok_prompt=1000.0, usd_per_mtok_sampled=5000.0)


def spent(folder: Path) -> tuple[int, float]:
    turns = [turn for record in read_run(folder) for turn in record.turns]
    prompt, sampled = (sum(turn[name] for turn in turns) for name in ("prompt_tokens", "sampled_tokens"))
    return prompt + sampled, (prompt * 1000 + sampled * 5000) / 1e6


async def test_every_combination_is_a_run_of_its_own_and_all_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = combinations("good,mixed", 2, [])
    async with standin_model(right) as (good, log_a), standin_model(sometimes_right) as (mixed, log_b):

        def make_env(cell: Combination) -> NumberEnv:
            model = good if cell.model == "good" else mixed
            servers = [ServerConfig(server_type="standin", model_name=cell.model)]
            return NumberEnv(None, model, servers, eval_items=4, sampling_seed=cell.seed)

        assert await evaluate_grid(cells, make_env, tmp_path, fresh=False) == 0
        asked = len(log_a.log) + len(log_b.log)
        assert await evaluate_grid(cells, make_env, tmp_path, fresh=False) == 0
        assert len(log_a.log) + len(log_b.log) == asked, "a second start repeats nothing"
    assert [len(read_run(tmp_path / cell.folder)) for cell in cells] == [4, 4, 4, 4]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {part["name"]: part["rollouts"] for part in summary["policies"]} == {"good": 8, "mixed": 8}
    seeds = [{r.item_id: r.seed for r in read_run(tmp_path / "mixed" / f"seed-{n}")} for n in (0, 1)]
    assert seeds[0].keys() == seeds[1].keys()
    assert all(seeds[0][item] != seeds[1][item] for item in seeds[0])
    assert "Wins 0, losses" in capsys.readouterr().out


@pytest.mark.parametrize("budget", [{"tokens": 1}, {"usd": 0.001}])
async def test_a_budget_ends_a_run_and_a_larger_one_goes_on(
    pool: DirectoryPool, tmp_path: Path, budget: dict[str, Any]
) -> None:
    async with standin_model(right) as (model, _):

        def env(**limits: Any) -> NumberEnv:
            settings = {"total_steps": 3, "groups_at_once": 1, "budget": BudgetSettings(**limits)}
            return NumberEnv(pool, model, [PRICED], **settings)

        assert await process_run(env(**budget), tmp_path) == 1
        assert len(read_run(tmp_path)) == 4, "the group that ran was finished, and no other was started"
        assert await process_run(env(**budget), tmp_path) == 1
        assert len(read_run(tmp_path)) == 4, "what an earlier start used up counts"
        tokens, usd = spent(tmp_path)
        assert await process_run(env(tokens=tokens + 1, usd=2 * usd), tmp_path) == 1
        assert len(read_run(tmp_path)) == 8
        assert await process_run(env(), tmp_path) == 0
        assert len(read_run(tmp_path)) == 12


async def test_a_budget_in_money_needs_prices(pool: DirectoryPool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="usd_per_mtok_prompt"):
        await evaluate_run(NumberEnv(pool, object(), budget=BudgetSettings(usd=1.0)), tmp_path)


def test_the_cells_of_a_grid() -> None:
    cells = combinations("a,b", 2, ["env.eval_temperature=0.2,1"])
    assert len(cells) == 8
    assert cells[-1].settings() == ["--env.eval_temperature", "1", "--env.sampling_seed", "1"]
    assert cells[-1].folder == Path("b env.eval_temperature=1", "seed-1")
    assert combinations("org/a", None, [])[0].folder == Path("org%2Fa")


@pytest.mark.parametrize(
    ("models", "vary", "message"),
    [("a,,b", [], "--models"), ("a,a", [], "--models"), (None, ["x=1"], "--vary"), (None, ["env.seed="], "--vary")],
)
def test_cells_that_make_no_sense_are_refused(models: str | None, vary: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        combinations(models, None, vary)


def test_a_model_is_one_of_the_servers_or_a_name_at_the_only_one() -> None:
    small, large = (ServerConfig(base_url=f"http://{name}:1", model_name=name) for name in ("small", "large"))
    assert servers_of([small, large], "large") == [large]
    assert servers_of([small], "other")[0].model_name == "other"
    with pytest.raises(UsageError, match="no server of 'larg'; did you mean 'large'"):
        servers_of([small, large], "larg")
