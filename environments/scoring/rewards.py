"""Reward = verifier score plus shaping terms. Every component is kept by name, and they always add up to the total.

The sum of all terms is clipped to `shaping_bounds`. With the default bounds and a verifier that says 0 or 1, no
shaping can lift a failed rollout above a solved one. docs/reference/rewards.md says what is known of each recipe.

Each term reads named metrics of one rollout and gives a bonus in [0, 1] or a penalty in [-1, 0]. It declares what it
reads, so that a missing metric is found when the environment starts and not after the first rollout. To add a term,
write a class and add it to `AnyTerm`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sandbox_pool.errors import did_you_mean

Metrics = Mapping[str, float]

ATTEMPTED = "tool_calls_attempted"
FLAWS = ("tool_calls_invalid", "tool_calls_malformed", "tool_calls_unknown", "tool_calls_repaired")


class Term(BaseModel):
    """What all terms can be told. A term that is not `when` its time counts as 0."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = Field(ge=0.0, allow_inf_nan=False)
    """The most that this term can add or take away. 0 keeps the term in the log without any effect."""
    when: Literal["always", "solved", "unsolved"] = "always"
    """`solved` applies the term only to rollouts with the full verifier score, so that it can only rank successes."""

    def reads(self) -> tuple[str, ...]:
        """Names of the metrics that `value` looks up."""
        raise NotImplementedError

    def value(self, metrics: Metrics) -> float:
        """Before clipping to [-1, 1] and weighting."""
        raise NotImplementedError


def share(part: float, whole: float) -> float:
    """Part of a whole, 0 when there is no whole."""
    return part / whole if whole > 0 else 0.0


class ValidCalls(Term):
    """Bonus: share of attempted calls whose name and arguments fit a tool's schema."""

    def reads(self) -> tuple[str, ...]:
        return (ATTEMPTED, "valid_rate")

    def value(self, metrics: Metrics) -> float:
        """0 without any call: staying silent earns nothing."""
        return metrics["valid_rate"] if metrics[ATTEMPTED] > 0 else 0.0


class OkCalls(Term):
    """Bonus: share of attempted calls that ran without an error."""

    def reads(self) -> tuple[str, ...]:
        return (ATTEMPTED, "tool_calls_executed_ok")

    def value(self, metrics: Metrics) -> float:
        return share(metrics["tool_calls_executed_ok"], metrics[ATTEMPTED])


class CleanExits(Term):
    """Bonus: share of attempted calls whose command ended with exit code 0."""

    def reads(self) -> tuple[str, ...]:
        return (ATTEMPTED, "tool_calls_executed_ok", "tool_calls_nonzero_exit")

    def value(self, metrics: Metrics) -> float:
        """0 without any call. A call that timed out counts as failed and did not run well: never below 0."""
        clean = metrics["tool_calls_executed_ok"] - metrics["tool_calls_nonzero_exit"]
        return share(max(0.0, clean), metrics[ATTEMPTED])


class CleanFormat(Term):
    """Bonus, all or nothing: some call, and none invalid, malformed, unknown or repaired (ToolRL's format reward)."""

    def reads(self) -> tuple[str, ...]:
        """Every count of calls that were not clean."""
        return (ATTEMPTED, *FLAWS)

    def value(self, metrics: Metrics) -> float:
        return 1.0 if metrics[ATTEMPTED] > 0 and not any(metrics[name] for name in FLAWS) else 0.0


class SharePenalty(Term):
    """Base of penalties for the share of attempted calls with a flaw."""

    def counts(self) -> tuple[str, ...]:
        """The metrics that count flawed calls; no call is in two of them."""
        raise NotImplementedError

    def reads(self) -> tuple[str, ...]:
        """The flaw's counts and the count of all calls."""
        return (ATTEMPTED, *self.counts())

    def value(self, metrics: Metrics) -> float:
        return -share(sum(metrics[name] for name in self.counts()), metrics[ATTEMPTED])


class InvalidCalls(SharePenalty):
    """Penalty: calls that could not be run because of their markup or arguments."""

    def counts(self) -> tuple[str, ...]:
        return ("tool_calls_invalid", "tool_calls_malformed")


class UnknownTools(SharePenalty):
    """Penalty: calls of tools that do not exist."""

    def counts(self) -> tuple[str, ...]:
        return ("tool_calls_unknown",)


class RepairedCalls(SharePenalty):
    """Penalty: calls that ran only because a repair was made. Keeps the signal to write them right."""

    def counts(self) -> tuple[str, ...]:
        return ("tool_calls_repaired",)


class FailedCalls(SharePenalty):
    """Penalty: calls that ran and ended in an error. Exploring costs errors too: weigh it lightly."""

    def counts(self) -> tuple[str, ...]:
        return ("tool_calls_exec_error",)


class DuplicateCalls(SharePenalty):
    """Penalty: calls that repeat an earlier one of the rollout exactly."""

    def counts(self) -> tuple[str, ...]:
        return ("tool_calls_duplicate",)


class RampPenalty(Term):
    """Base of penalties that grow linearly from 0 at `free` to -1 at `limit`."""

    free: float = Field(ge=0.0)
    """Up to here nothing is taken away."""
    limit: float
    """From here on the full weight is taken away."""

    @model_validator(mode="after")
    def _limit_above_free(self) -> RampPenalty:
        if self.limit <= self.free:
            raise ValueError(f"limit ({self.limit:g}) must be greater than free ({self.free:g})")
        return self

    def measures(self) -> str:
        """The metric the ramp is over."""
        raise NotImplementedError

    def reads(self) -> tuple[str, ...]:
        return (self.measures(),)

    def value(self, metrics: Metrics) -> float:
        return -min(1.0, max(0.0, (metrics[self.measures()] - self.free) / (self.limit - self.free)))


class Turns(RampPenalty):
    """Penalty: many turns."""

    def measures(self) -> str:
        return "turns"


class Length(RampPenalty):
    """Penalty: many sampled tokens (DAPO's soft overlong punishment, over the whole rollout)."""

    def measures(self) -> str:
        return "sampled_tokens"


class FewCalls(Term):
    """Bonus: OTC's efficiency reward, 1 when exactly `optimum` calls were made. Best with `when: solved`."""

    optimum: int = Field(ge=0)
    """The least number of calls a solution needs."""
    patience: float = Field(default=4.0, gt=0.0)
    """With an optimum of 0: the smaller, the faster the bonus falls with each call."""

    def reads(self) -> tuple[str, ...]:
        """Calls, good or bad: each one costs."""
        return (ATTEMPTED,)

    def value(self, metrics: Metrics) -> float:
        """After the formulas of the OTC paper (arXiv 2504.14870)."""
        calls, best = metrics[ATTEMPTED], self.optimum
        if best == 0:
            return math.cos(calls * math.pi / (2 * calls + self.patience))
        mapped = 2 * best * calls / (calls + best)
        return math.sin(mapped * math.pi / (2 * best))


AnyTerm = (
    ValidCalls
    | OkCalls
    | CleanExits
    | CleanFormat
    | InvalidCalls
    | UnknownTools
    | RepairedCalls
    | FailedCalls
    | DuplicateCalls
    | Turns
    | Length
    | FewCalls
)

TERMS: dict[str, type[Term]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in get_args(AnyTerm)
}
"""`ValidCalls` is set as `valid_calls`, and so on."""


VERIFIER = "verifier"
BOUNDS = "shaping_bounds"
"""Name of the component that holds what the bounds took away from, or gave back to, the sum of the terms."""


class RewardError(ValueError):
    """A reward cannot be configured or computed as asked; the message is one sentence."""


@cache
def recipes() -> dict[str, dict[str, Any]]:
    """The recipes that ship with the package, by name."""
    loaded: dict[str, dict[str, Any]] = yaml.safe_load(
        (files("environments.scoring") / "reward_recipes.yaml").read_text("utf-8")
    )
    return loaded


class RewardConfig(BaseModel):
    """How rollouts are rewarded. `recipe` fills in everything that is not given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str | None = None
    """Name of a recipe in reward_recipes.yaml."""
    verifier_weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Factor on the verifier score."""
    solved_at: float = 1.0
    """From this verifier score on a rollout counts as solved: for terms with `when`, and for `sft.jsonl`."""
    shaping_bounds: tuple[float, float] = (-0.4, 0.4)
    """The sum of all terms is clipped to this range."""
    terms: dict[str, AnyTerm] = Field(default_factory=dict)
    """Term name -> its settings."""
    metric_names: dict[str, str] = Field(default_factory=dict)
    """Metric as a term calls it -> metric as the loop calls it, where the two differ."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_recipe(cls, data: Any) -> Any:
        name = data.get("recipe") if isinstance(data, dict) else None
        if name is None:
            return data
        if not isinstance(name, str) or name not in recipes():
            raise ValueError(f"unknown reward recipe {name!r}; {did_you_mean(str(name), recipes())}")
        base = recipes()[name]
        terms = {**base.get("terms", {}), **(data.get("terms") or {})}
        return {**base, **data, "terms": terms}

    @field_validator("terms", mode="before")
    @classmethod
    def _build_terms(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("terms is a mapping from term name to its settings")
        return {name: _build_term(str(name), settings) for name, settings in value.items()}

    @field_validator("shaping_bounds")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        low, high = value
        if not (math.isfinite(low) and math.isfinite(high) and low <= 0.0 <= high):
            raise ValueError("shaping_bounds is [low, high] with low <= 0 <= high")
        return value


def _build_term(name: str, settings: Any) -> Term:
    if isinstance(settings, Term):
        return settings
    if name not in TERMS:
        raise ValueError(f"unknown reward term {name!r}; {did_you_mean(name, TERMS)}")
    if isinstance(settings, int | float) and not isinstance(settings, bool):
        settings = {"weight": settings}
    if not isinstance(settings, dict):
        raise ValueError(f"reward term {name!r} needs a weight or a mapping of settings")
    known = TERMS[name].model_fields
    for key in settings:
        if key not in known:
            raise ValueError(f"unknown setting {key!r} of reward term {name!r}; {did_you_mean(str(key), known)}")
    return TERMS[name].model_validate(settings)


@dataclass(frozen=True)
class Reward:
    """One rollout's reward, taken apart."""

    total: float
    verifier_score: float
    """As the verifier gave it, before any weight."""
    components: dict[str, float] = field(default_factory=dict)
    """Weighted contributions: `verifier`, each term, and `shaping_bounds` when they cut. They add up to the total."""
    raw: dict[str, float] = field(default_factory=dict)
    """Each term before its weight, in [-1, 1]; terms that did not apply are missing."""


class Rewards:
    """Computes rewards by one config; refuses at construction what could not be computed later."""

    def __init__(self, config: RewardConfig, available_metrics: Collection[str]) -> None:
        """`available_metrics` are the names that every rollout of this environment will carry."""
        self.config = config
        for name, term in config.terms.items():
            for metric in term.reads():
                source = config.metric_names.get(metric, metric)
                if source not in available_metrics:
                    raise RewardError(
                        f"reward term {name!r} reads metric {source!r}, which rollouts do not carry"
                        f"; {did_you_mean(source, available_metrics)}"
                    )

    def compute(self, verifier_score: float, metrics: Mapping[str, float]) -> Reward:
        """Reward of one rollout; RewardError when it is not a finite number."""
        if not math.isfinite(verifier_score):
            raise RewardError(f"the verifier score is {verifier_score}")
        raw = {name: self._raw(name, term, metrics) for name, term in self._active(verifier_score)}
        components = {VERIFIER: self.config.verifier_weight * verifier_score}
        components |= {name: self.config.terms[name].weight * raw.get(name, 0.0) for name in self.config.terms}
        shaping = sum(components[name] for name in self.config.terms)
        low, high = self.config.shaping_bounds
        bounded = min(high, max(low, shaping))
        if bounded != shaping:
            components[BOUNDS] = bounded - shaping
        return Reward(components[VERIFIER] + bounded, verifier_score, components, raw)

    def _active(self, verifier_score: float) -> list[tuple[str, Term]]:
        state = "solved" if verifier_score >= self.config.solved_at else "unsolved"
        return [(name, term) for name, term in self.config.terms.items() if term.when in ("always", state)]

    def _raw(self, name: str, term: Term, metrics: Mapping[str, float]) -> float:
        read: dict[str, float] = {}
        for metric in term.reads():
            value = metrics.get(self.config.metric_names.get(metric, metric))
            if value is None or not math.isfinite(value):
                raise RewardError(f"reward term {name!r}: metric {metric!r} of this rollout is {value}")
            read[metric] = float(value)
        return min(1.0, max(-1.0, term.value(read)))
