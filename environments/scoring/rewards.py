"""Reward = verifier score plus shaping. Every component is kept by name, and they always add up to the total.

The sum of all shaping is clipped to `shaping_bounds`. With the default bounds and a verifier that says 0 or 1, no
shaping can lift a failed rollout above a solved one. docs/reference/rewards.md says what is known of each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError, field_validator, model_validator

from environments.scoring.reward_terms import TERMS, Term
from sandbox_pool.errors import did_you_mean

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
    """How rollouts are rewarded. `recipe` fills in everything that is not given beside it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str | None = None
    """Name of a recipe in reward_recipes.yaml."""
    verifier_weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Factor on the verifier score."""
    solved_at: float = 1.0
    """From this verifier score on a rollout counts as solved for terms with `when`."""
    shaping_bounds: tuple[float, float] = (-0.4, 0.4)
    """The sum of all terms is clipped to this range."""
    terms: dict[str, SerializeAsAny[Term]] = Field(default_factory=dict)
    """Term name -> its settings."""
    metric_names: dict[str, str] = Field(default_factory=dict)
    """Metric as a term calls it -> metric as the loop calls it, where the two differ."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_recipe(cls, data: Any) -> Any:
        name = data.get("recipe") if isinstance(data, dict) else None
        if name is None:
            return data
        if name not in recipes():
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
        """Reward of one rollout; raises RewardError rather than return a number that is none."""
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


def load_reward_config(data: Mapping[str, Any]) -> RewardConfig:
    """Config from a plain mapping (a YAML section); raises RewardError with one sentence."""
    try:
        return RewardConfig.model_validate(dict(data))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise RewardError(f"rewards{'.' + place if place else ''}: {message}") from error
