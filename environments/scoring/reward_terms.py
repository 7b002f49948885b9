"""The shaping terms. Each reads named metrics of one rollout and gives a bonus in [0, 1] or a penalty in [-1, 0].

A term declares what it reads, so that a missing metric is found when the environment starts and not after the first
rollout. Adding a term is adding a class and its name to `TERMS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
        """The rate, and the count that tells a rate of nothing from a rate."""
        return (ATTEMPTED, "valid_rate")

    def value(self, metrics: Metrics) -> float:
        """0 without any call: silence is no merit."""
        return metrics["valid_rate"] if metrics[ATTEMPTED] > 0 else 0.0


class OkCalls(Term):
    """Bonus: share of attempted calls that ran without an error."""

    def reads(self) -> tuple[str, ...]:
        """Good calls among all."""
        return (ATTEMPTED, "tool_calls_executed_ok")

    def value(self, metrics: Metrics) -> float:
        """0 without any call."""
        return share(metrics["tool_calls_executed_ok"], metrics[ATTEMPTED])


class CleanExits(Term):
    """Bonus: share of attempted calls whose command ended with exit code 0."""

    def reads(self) -> tuple[str, ...]:
        """Calls that ran, and those of them whose command failed."""
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
        """1 or 0."""
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
        """-1 when every call has the flaw."""
        return -share(sum(metrics[name] for name in self.counts()), metrics[ATTEMPTED])


class InvalidCalls(SharePenalty):
    """Penalty: calls that could not be run because of their markup or arguments."""

    def counts(self) -> tuple[str, ...]:
        """Bad arguments, bad markup."""
        return ("tool_calls_invalid", "tool_calls_malformed")


class UnknownTools(SharePenalty):
    """Penalty: calls of tools that do not exist."""

    def counts(self) -> tuple[str, ...]:
        """Calls with an unknown name."""
        return ("tool_calls_unknown",)


class RepairedCalls(SharePenalty):
    """Penalty: calls that ran only because a repair was made. Keeps the signal to write them right."""

    def counts(self) -> tuple[str, ...]:
        """Repaired calls."""
        return ("tool_calls_repaired",)


class FailedCalls(SharePenalty):
    """Penalty: calls that ran and ended in an error. Exploring costs errors too: weigh it lightly."""

    def counts(self) -> tuple[str, ...]:
        """Calls with an error result."""
        return ("tool_calls_exec_error",)


class DuplicateCalls(SharePenalty):
    """Penalty: calls that repeat an earlier one of the rollout exactly."""

    def counts(self) -> tuple[str, ...]:
        """Exact repetitions."""
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
        """The one metric."""
        return (self.measures(),)

    def value(self, metrics: Metrics) -> float:
        """From 0 to -1."""
        return -min(1.0, max(0.0, (metrics[self.measures()] - self.free) / (self.limit - self.free)))


class Turns(RampPenalty):
    """Penalty: many turns."""

    def measures(self) -> str:
        """Turns of the rollout."""
        return "turns"


class Length(RampPenalty):
    """Penalty: many sampled tokens (DAPO's soft overlong punishment, over the whole rollout)."""

    def measures(self) -> str:
        """Sampled tokens of the rollout."""
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


TERMS: dict[str, type[Term]] = {
    "valid_calls": ValidCalls,
    "ok_calls": OkCalls,
    "clean_exits": CleanExits,
    "clean_format": CleanFormat,
    "invalid_calls": InvalidCalls,
    "unknown_tools": UnknownTools,
    "repaired_calls": RepairedCalls,
    "failed_calls": FailedCalls,
    "duplicate_calls": DuplicateCalls,
    "turns": Turns,
    "length": Length,
    "few_calls": FewCalls,
}
