from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.errors import ConfigError
from environments.launch import load_environment
from environments.scoring.rewards import TERMS, RewardConfig, RewardError, Rewards, recipes

METRICS = (
    "tool_calls_attempted",
    "tool_calls_executed_ok",
    "tool_calls_exec_error",
    "tool_calls_invalid",
    "tool_calls_malformed",
    "tool_calls_unknown",
    "tool_calls_repaired",
    "tool_calls_duplicate",
    "tool_calls_nonzero_exit",
    "valid_rate",
    "ok_rate",
    "turns",
    "sampled_tokens",
)
NEEDED = {"turns": {"free": 3, "limit": 9}, "length": {"free": 100, "limit": 900}, "few_calls": {"optimum": 2}}


@st.composite
def rollouts(draw: st.DrawFn) -> dict[str, float]:
    """Metrics that can occur: parts never exceed the whole."""
    attempted = draw(st.integers(0, 50))
    parts = {
        name: float(draw(st.integers(0, attempted)))
        for name in METRICS
        if name.startswith("tool_calls_") and name != "tool_calls_attempted"
    }
    rate = draw(st.floats(0, 1)) if attempted else 0.0
    return parts | {
        "tool_calls_attempted": float(attempted),
        "valid_rate": rate,
        "ok_rate": rate,
        "turns": float(draw(st.integers(0, 100))),
        "sampled_tokens": float(draw(st.integers(0, 100_000))),
    }


@st.composite
def configs(draw: st.DrawFn) -> RewardConfig:
    names = draw(st.lists(st.sampled_from(sorted(TERMS)), unique=True))
    terms = {
        name: {
            "weight": draw(st.floats(0, 5)),
            "when": draw(st.sampled_from(["always", "solved", "unsolved"])),
            **NEEDED.get(name, {}),
        }
        for name in names
    }
    bounds = [draw(st.floats(-2, 0)), draw(st.floats(0, 2))]
    return RewardConfig.model_validate(
        {"terms": terms, "shaping_bounds": bounds, "verifier_weight": draw(st.floats(0.1, 6))}
    )


@given(config=configs(), metrics=rollouts(), verifier=st.floats(0, 1))
def test_components_add_up_and_the_total_stays_in_its_bounds(
    config: RewardConfig, metrics: dict[str, float], verifier: float
) -> None:
    reward = Rewards(config, METRICS).compute(verifier, metrics)
    assert reward.verifier_score == verifier
    assert math.isclose(sum(reward.components.values()), reward.total, abs_tol=1e-9)
    base = config.verifier_weight * verifier
    low, high = config.shaping_bounds
    assert base + low - 1e-9 <= reward.total <= base + high + 1e-9
    assert all(-1.0 <= value <= 1.0 for value in reward.raw.values())
    assert set(config.terms) <= set(reward.components)


@given(config=configs(), metrics=rollouts(), scores=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)))
def test_a_better_verifier_score_never_lowers_the_reward(
    config: RewardConfig, metrics: dict[str, float], scores: tuple[float, float]
) -> None:
    rewards = Rewards(config, METRICS)
    low, high = sorted(scores)
    assert rewards.compute(low, metrics).total <= rewards.compute(high, metrics).total + 1e-9


WEIGHTS = st.lists(st.floats(0, 3), min_size=len(TERMS), max_size=len(TERMS))


@given(metrics=rollouts(), other=rollouts(), weights=WEIGHTS)
def test_with_default_bounds_no_failure_outranks_a_success(
    metrics: dict[str, float], other: dict[str, float], weights: list[float]
) -> None:
    terms = {n: {"weight": w, **NEEDED.get(n, {})} for n, w in zip(sorted(TERMS), weights, strict=True)}
    rewards = Rewards(RewardConfig.model_validate({"terms": terms}), METRICS)
    assert rewards.compute(0.0, metrics).total < rewards.compute(1.0, other).total


@given(metrics=rollouts(), verifier=st.floats(0, 1))
def test_weights_of_zero_leave_the_verifier_score_alone(metrics: dict[str, float], verifier: float) -> None:
    terms = {name: {"weight": 0, **NEEDED.get(name, {})} for name in TERMS}
    reward = Rewards(RewardConfig.model_validate({"terms": terms}), METRICS).compute(verifier, metrics)
    assert reward.total == verifier
    assert set(reward.raw) == set(TERMS)


PENALTIES = {
    "invalid_calls": "tool_calls_invalid",
    "unknown_tools": "tool_calls_unknown",
    "repaired_calls": "tool_calls_repaired",
    "failed_calls": "tool_calls_exec_error",
    "duplicate_calls": "tool_calls_duplicate",
    "turns": "turns",
    "length": "sampled_tokens",
}


@pytest.mark.parametrize(("term", "metric"), PENALTIES.items())
@settings(max_examples=30)
@given(metrics=rollouts(), steps=st.tuples(st.integers(0, 50), st.integers(0, 50)))
def test_more_of_a_flaw_never_raises_the_reward(
    term: str, metric: str, metrics: dict[str, float], steps: tuple[int, int]
) -> None:
    rewards = Rewards(RewardConfig.model_validate({"terms": {term: {"weight": 0.3, **NEEDED.get(term, {})}}}), METRICS)
    few, many = sorted(steps)
    metrics = {**metrics, "tool_calls_attempted": 50.0}
    less, more = ({**metrics, metric: float(count)} for count in (few, many))
    assert rewards.compute(0.0, more).total <= rewards.compute(0.0, less).total <= 0.0


@pytest.mark.parametrize(("term", "metric"), [("valid_calls", "valid_rate"), ("ok_calls", "tool_calls_executed_ok")])
def test_good_calls_raise_the_reward_and_silence_earns_nothing(term: str, metric: str) -> None:
    rewards = Rewards(RewardConfig.model_validate({"terms": {term: 0.2}}), METRICS)
    metrics = dict.fromkeys(METRICS, 0.0)
    assert rewards.compute(0.0, metrics).total == 0.0
    assert rewards.compute(0.0, metrics | {"tool_calls_attempted": 2.0, metric: 1.0}).total > 0.0


def test_clean_exits_pay_for_commands_that_succeed_and_for_nothing_else() -> None:
    rewards = Rewards(RewardConfig.model_validate({"terms": {"clean_exits": 0.2}}), METRICS)
    ran = dict.fromkeys(METRICS, 0.0) | {"tool_calls_attempted": 2.0, "tool_calls_executed_ok": 2.0}
    earned = [rewards.compute(0.0, ran | {"tool_calls_nonzero_exit": failed}).total for failed in (0.0, 1.0, 2.0)]
    assert earned == pytest.approx([0.2, 0.1, 0.0])


@pytest.mark.parametrize("optimum", [0, 1, 3, 7])
def test_few_calls_peaks_at_the_optimum_and_falls_after_it(optimum: int) -> None:
    config = RewardConfig.model_validate({"terms": {"few_calls": {"weight": 0.4, "optimum": optimum}}})
    rewards = Rewards(config, METRICS)
    earned = [rewards.compute(1.0, {"tool_calls_attempted": float(n)}).total for n in range(20)]
    assert max(earned) == earned[optimum] == pytest.approx(1.4)
    assert earned[optimum:] == sorted(earned[optimum:], reverse=True)


def test_a_term_for_solved_rollouts_leaves_the_others_alone() -> None:
    config = RewardConfig.model_validate({"recipe": "otc"})
    rewards = Rewards(config, METRICS)
    assert rewards.compute(0.0, {"tool_calls_attempted": 1.0}).total == 0.0
    assert rewards.compute(1.0, {"tool_calls_attempted": 1.0}).total == pytest.approx(1.4)
    assert rewards.compute(0.0, {}).raw == {}


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_loads_and_is_documented(name: str) -> None:
    Rewards(RewardConfig.model_validate({"recipe": name}), METRICS)
    page = Path(__file__).resolve().parents[3] / "docs" / "reference" / "rewards.md"
    assert f"`{name}`" in page.read_text()


def test_what_is_given_beside_a_recipe_wins() -> None:
    config = RewardConfig.model_validate(
        {"recipe": "format_penalty", "shaping_bounds": [-1, 0], "terms": {"unknown_tools": 0.9, "failed_calls": 0.1}}
    )
    assert config.shaping_bounds == (-1, 0)
    assert config.terms["unknown_tools"].weight == 0.9
    assert set(config.terms) == {"invalid_calls", "unknown_tools", "repaired_calls", "failed_calls"}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"terms": {"valid_call": 1}}, "unknown reward term 'valid_call'; did you mean 'valid_calls'"),
        ({"terms": {"turns": {"weight": 1, "fre": 1, "limit": 2}}}, "unknown key 'fre'.*did you mean 'free'"),
        ({"terms": {"turns": {"weight": 1, "free": 5, "limit": 2}}}, "must be greater than free"),
        ({"terms": {"turns": "much"}}, "needs a weight"),
        ({"terms": {"valid_calls": -1}}, "greater than or equal to 0"),
        ({"terms": ["valid_calls"]}, "mapping"),
        ({"recipe": "toolr"}, "did you mean 'toolrl'"),
        ({"shaping_bounds": [1, 2]}, "low <= 0 <= high"),
        ({"verifier_weight": 0}, "greater than 0"),
        ({"trems": {}}, "unknown key 'trems' in 'env.rewards'; did you mean 'terms'"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused_in_one_sentence(tmp_path: Path, data: dict, sentence: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"environment": "terminal_tasks", "env": {"rewards": data}}))
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_environment(path)
    assert "\n" not in str(caught.value)


def test_a_term_takes_its_own_settings_from_a_config() -> None:
    settings = ["--env.rewards.terms.turns", "{weight: 0.1, free: 5, limit: 30}"]
    terms = load_environment("terminal_tasks", settings).config.rewards.terms
    assert terms == {"turns": TERMS["turns"](weight=0.1, free=5, limit=30)}


def test_a_metric_the_loop_does_not_deliver_is_found_at_start_and_can_be_renamed() -> None:
    config = RewardConfig.model_validate({"terms": {"ok_calls": 0.1}})
    with pytest.raises(
        RewardError, match=r"'ok_calls' reads metric 'tool_calls_executed_ok'.*did you mean 'tool_calls_executed'"
    ):
        Rewards(config, ["tool_calls_attempted", "tool_calls_executed"])
    renamed = RewardConfig.model_validate(
        {"terms": {"ok_calls": 0.1}, "metric_names": {"tool_calls_executed_ok": "tool_calls_executed"}}
    )
    rewards = Rewards(renamed, ["tool_calls_attempted", "tool_calls_executed"])
    assert rewards.compute(0.0, {"tool_calls_attempted": 2, "tool_calls_executed": 2}).total == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_never_becomes_a_reward(bad: float) -> None:
    rewards = Rewards(RewardConfig.model_validate({"terms": {"ok_calls": 0.1}}), METRICS)
    with pytest.raises(RewardError, match="verifier score"):
        rewards.compute(bad, {})
    with pytest.raises(RewardError, match="tool_calls_executed_ok"):
        rewards.compute(1.0, {"tool_calls_attempted": 1.0, "tool_calls_executed_ok": bad})


def test_settings_of_a_term_can_be_given_in_a_file_and_are_stored_whole(tmp_path: Path) -> None:
    text = "environment: terminal_tasks\nenv: {rewards: {terms: {length: {weight: 0.1, free: 2048, limit: 8192}}}}\n"
    (tmp_path / "run.yaml").write_text(text)
    config = load_environment(tmp_path / "run.yaml").config
    assert config.rewards.model_dump()["terms"]["length"]["limit"] == 8192
    (tmp_path / "run.yaml").write_text(text.replace("limit", "limt"))
    with pytest.raises(ConfigError, match=r"unknown key 'limt' in 'env\.rewards\.terms\.length'; did you mean 'limit'"):
        load_environment(tmp_path / "run.yaml")
