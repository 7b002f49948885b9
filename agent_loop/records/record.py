"""One stored rollout: the line of a rollouts.jsonl that `process` and `demo` write and `verify` and `view` read.

Everything a reader needs is in the line itself, so that a file can be checked and looked at years later.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import orjson

from agent_loop.model.contract import Message, Segment, ToolSchema

RECORD_VERSION = 1


@dataclass
class SampledCall:
    """One request to the model as it went over the wire: enough to prove the segments right."""

    segment: int
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    duration_s: float = 0.0
    weights_version: str | None = None


@dataclass
class RolloutRecord:
    """A whole rollout. Token fields are empty when the server gave no tokens (`has_tokens` says which)."""

    rollout_id: str
    group_id: str
    environment: str
    item_id: str
    outcome: str
    trainable: bool
    messages: list[Message]
    tools: list[ToolSchema] = field(default_factory=list)
    score: float | None = None
    """The reward given to the trainer; None when the rollout is not trainable."""
    verifier_score: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    category: str = ""
    policy: str = ""
    """Model or scripted policy that played."""
    seed: int | None = None
    has_tokens: bool = False
    segments: list[Segment] = field(default_factory=list)
    sampled_calls: list[SampledCall] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    truncations: list[dict[str, Any]] = field(default_factory=list)
    """One entry per context truncation: the turn before which it happened and what was shortened or dropped."""
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds: model_s, tools_s, acquire_s, verify_s, total_s."""
    isolation: str = ""
    error: str | None = None
    """What ended an untrainable rollout, in one sentence."""
    version: int = RECORD_VERSION

    def to_json(self) -> bytes:
        """One line of JSON, without the newline."""
        return orjson.dumps(self)

    @classmethod
    def from_json(cls, line: bytes | str) -> RolloutRecord:
        """Read one line; raises ValueError naming the first key that is wrong."""
        data = orjson.loads(line)
        if not isinstance(data, dict):
            raise ValueError("a rollout record is a JSON object")
        if data.get("version") != RECORD_VERSION:
            raise ValueError(f"record version {data.get('version')!r} is not {RECORD_VERSION}")
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"unknown key {unknown[0]!r} in a rollout record")
        try:
            data["segments"] = [Segment(**s) for s in data.get("segments", [])]
            data["sampled_calls"] = [SampledCall(**c) for c in data.get("sampled_calls", [])]
            return cls(**data)
        except TypeError as error:
            raise ValueError(f"not a rollout record: {error}") from error
