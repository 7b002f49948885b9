"""Proves stored rollouts right, or names the first thing that is wrong.

Each check reads one record and gives sentences for what it finds. The order below is the order of the report: what a
later check relies on is checked before. `agent_loop.records.against` lets the model itself confirm the tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_loop.model.tokens.ledger import MASKED, NO_LOGPROB
from agent_loop.records.metrics import call_metrics
from agent_loop.records.record import RolloutRecord, SampledCall, covers

Check = Callable[[RolloutRecord], Iterator[str]]


def check_lengths(record: RolloutRecord) -> Iterator[str]:
    """Tokens, masks and logprobs of a segment have one length; records without tokens have none at all."""
    if not record.has_tokens and (record.segments or record.sampled_calls):
        yield "has_tokens is false, but there are tokens"
    if record.has_tokens and not (record.segments and record.sampled_calls):
        yield "has_tokens is true, but segments or the call log are missing"
    for index, s in enumerate(record.segments):
        if not len(s.tokens) == len(s.masks) == len(s.logprobs):
            sizes = f"{len(s.tokens)} tokens, {len(s.masks)} masks, {len(s.logprobs)} logprobs"
            yield f"segment {index}: {sizes}"
    for index, call in enumerate(record.sampled_calls):
        if len(call.sampled_ids) != len(call.logprobs):
            yield f"call {index}: {len(call.sampled_ids)} sampled tokens, {len(call.logprobs)} logprobs"
        if call.entropies and len(call.sampled_ids) != len(call.entropies):
            yield f"call {index}: {len(call.sampled_ids)} sampled tokens, {len(call.entropies)} entropies"


def check_masks(record: RolloutRecord) -> Iterator[str]:
    """A position is either masked (-100 / 1.0) or the token itself with a logprob that can be one."""
    for index, s in enumerate(record.segments):
        for position, (token, mask, logprob) in enumerate(zip(s.tokens, s.masks, s.logprobs, strict=False)):
            where = f"segment {index}, position {position}"
            if mask not in (MASKED, token):
                yield f"{where}: mask {mask} is neither {MASKED} nor the token {token}"
            elif mask == MASKED and logprob != NO_LOGPROB:
                yield f"{where}: masked, but its logprob is {logprob} and not {NO_LOGPROB}"
            elif mask != MASKED and not _is_logprob(logprob):
                yield f"{where}: {logprob} cannot be a logprob"


def check_segments(record: RolloutRecord) -> Iterator[str]:
    """Every call belongs to a segment, every segment has calls, and they come in order."""
    named = [call.segment for call in record.sampled_calls]
    if named != sorted(named):
        yield "the calls' segments go backwards"
    for index in sorted(set(named) - set(range(len(record.segments)))):
        yield f"segment {index} is in the call log, but not in the record"
    for index in sorted(set(range(len(record.segments))) - set(named)):
        yield f"segment {index} has no call in the log"


def check_wire(record: RolloutRecord) -> Iterator[str]:
    """Segments are what the server received and returned: each prompt a prefix, each sample right behind it."""
    for index, call in enumerate(record.sampled_calls):
        if call.segment >= len(record.segments):
            continue
        segment = record.segments[call.segment]
        start = len(call.prompt_ids)
        end = start + len(call.sampled_ids)
        where = f"call {index} (segment {call.segment})"
        if (at := _first_difference(segment.tokens[:start], call.prompt_ids)) is not None:
            yield f"{where}: the segment is not the prompt that was sent, from position {at} on"
        elif (at := _first_difference(segment.tokens[start:end], call.sampled_ids)) is not None:
            yield f"{where}: the segment is not what the server sampled, from position {start + at} on"
        elif (at := _first_difference(segment.logprobs[start:end], call.logprobs)) is not None:
            yield f"{where}: the logprob at position {start + at} is not the server's"
    for index, segment in enumerate(record.segments):
        calls = [c for c in record.sampled_calls if c.segment == index]
        if calls and len(segment.tokens) != _end(calls[-1]):
            yield f"segment {index}: {len(segment.tokens)} tokens, but its last call ends at {_end(calls[-1])}"


def check_prefixes(record: RolloutRecord) -> Iterator[str]:
    """Inside a segment each prompt begins with the prompt and the sample before it."""
    before: SampledCall | None = None
    for index, call in enumerate(record.sampled_calls):
        if before is not None and before.segment == call.segment:
            whole = before.prompt_ids + before.sampled_ids
            if (at := _first_difference(call.prompt_ids[: len(whole)], whole)) is not None:
                yield f"call {index}: its prompt leaves call {index - 1} at position {at}"
        before = call


def check_trained_once(record: RolloutRecord) -> Iterator[str]:
    """Each sampled token that has a logprob is unmasked exactly once, and nothing else is."""
    sampled: Counter[tuple[int, int]] = Counter()
    for call in record.sampled_calls:
        start = len(call.prompt_ids)
        sampled.update((call.segment, start + k) for k, p in enumerate(call.logprobs) if p != NO_LOGPROB)
    trained = {(i, p) for i, s in enumerate(record.segments) for p, mask in enumerate(s.masks) if mask != MASKED}
    for (segment, position), times in sampled.items():
        if times > 1:
            yield f"segment {segment}, position {position}: sampled {times} times"
        elif (segment, position) not in trained:
            yield f"segment {segment}, position {position}: sampled, but not trained"
    for segment, position in sorted(trained - set(sampled)):
        yield f"segment {segment}, position {position}: trained, but never sampled"


def check_turn_ends(record: RolloutRecord) -> Iterator[str]:
    """No end-of-turn token is written a second time behind the sampled one."""
    for index, call in enumerate(record.sampled_calls):
        if call.finish_reason == "stop" and call.sampled_ids and call.segment < len(record.segments):
            tokens = record.segments[call.segment].tokens
            end = _end(call)
            if end < len(tokens) and tokens[end] == call.sampled_ids[-1]:
                yield f"call {index}: the end-of-turn token {tokens[end]} is doubled at position {end}"


def check_weights(record: RolloutRecord) -> Iterator[str]:
    """Where weights are given per token, every sampled token has its own."""
    for index, call in enumerate(record.sampled_calls):
        if not call.weights_spans:
            continue
        if not covers(call.weights_spans, len(call.sampled_ids)):
            yield f"call {index}: its weights spans do not cover its {len(call.sampled_ids)} tokens one after the other"
        elif call.weights_version != call.weights_spans[0].version:
            yield f"call {index}: weights_version is {call.weights_version!r}, its first token's is another"


def check_messages(record: RolloutRecord) -> Iterator[str]:
    """Every tool message answers a call of the assistant turn before it, each call at most once."""
    open_ids: set[Any] = set()
    for index, message in enumerate(record.messages):
        if message.get("role") == "assistant":
            ids = [call.get("id") for call in message.get("tool_calls") or []]
            if len(ids) != len(set(ids)):
                yield f"message {index}: two calls have the same id"
            open_ids = set(ids)
        elif message.get("role") == "tool":
            if message.get("tool_call_id") not in open_ids:
                yield f"message {index}: answers {message.get('tool_call_id')!r}, which the turn before did not call"
            open_ids.discard(message.get("tool_call_id"))


def check_sampled_by(record: RolloutRecord) -> Iterator[str]:
    """Every call sampled one assistant message, in order, and each turn names the same one."""
    if not record.sampled_by:
        return  # a rollout that never began
    if len(record.sampled_by) != len(record.messages):
        yield f"{len(record.messages)} messages, but sampled_by has {len(record.sampled_by)} entries"
        return
    places = {call: place for place, call in enumerate(record.sampled_by) if call is not None}
    named = [call for call in record.sampled_by if call is not None]
    made = len(record.sampled_calls) or len(record.turns)
    if named != list(range(made)):
        yield f"the messages were sampled by calls {named}, but there are {made} calls"
    for call, place in places.items():
        if record.messages[place].get("role") != "assistant":
            yield f"message {place}: sampled by call {call}, but its role is {record.messages[place].get('role')!r}"
        named_by_turn = record.turns[call].get("message", place) if call < len(record.turns) else place
        if named_by_turn != place:
            yield f"message {place}: sampled by call {call}, but turn {call} names message {named_by_turn}"


def check_metrics(record: RolloutRecord) -> Iterator[str]:
    """Counts in `metrics` are those of the trajectory, and a score is there exactly when it may be trained on."""
    if record.score is not None and not math.isfinite(record.score):
        yield f"the score {record.score} is not finite"
    if record.score is not None and not record.trainable:
        yield f"a rollout that ended as {record.outcome} is not trainable, but has a score"
    if record.sampled_calls and record.turns and len(record.turns) != len(record.sampled_calls):
        yield f"{len(record.turns)} turns, but {len(record.sampled_calls)} calls of the model"
    try:
        counted = _counted_again(record)
    except (KeyError, TypeError) as error:
        yield f"the tool-call records cannot be counted: {type(error).__name__} {error}"
        return
    for name, value in counted.items():
        stored = record.metrics.get(name)
        if stored is not None and not math.isclose(stored, value, rel_tol=1e-6, abs_tol=1e-6):
            yield f"metrics.{name} is {stored:g}, the trajectory has {value:g}"


def _counted_again(record: RolloutRecord) -> dict[str, float]:
    """What the trajectory says about every metric that can be worked out from it."""
    counted = {"turns": float(len(record.turns)), "truncations": float(len(record.truncations))}
    if "tool_calls_attempted" in record.metrics:
        counted |= call_metrics(record.tool_calls)
    if record.has_tokens:
        counted["sampled_tokens"] = float(sum(len(c.sampled_ids) for c in record.sampled_calls))
    return counted


def _is_logprob(value: Any) -> bool:
    """A finite number that is not above 0, rounding aside; NaN is stored as null."""
    return isinstance(value, float | int) and math.isfinite(value) and value <= 1e-4


def _first_difference(left: list[Any], right: list[Any]) -> int | None:
    """Where two lists part; their shorter length when one is the other's beginning; None when they are equal."""
    if left == right:
        return None
    return next((k for k, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _end(call: SampledCall) -> int:
    return len(call.prompt_ids) + len(call.sampled_ids)


CHECKS: dict[str, Check] = {
    "lengths": check_lengths,
    "masks and logprobs": check_masks,
    "segments complete": check_segments,
    "equal to the wire": check_wire,
    "prefixes": check_prefixes,
    "trained exactly once": check_trained_once,
    "turn ends not doubled": check_turn_ends,
    "weights versions": check_weights,
    "messages paired": check_messages,
    "messages and their calls": check_sampled_by,
    "metrics": check_metrics,
}


@dataclass(frozen=True)
class Violation:
    rollout_id: str
    line: int
    check: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line} (rollout {self.rollout_id}): {self.check}: {self.message}"


@dataclass
class Report:
    """What was looked at and what was found."""

    rollouts: int = 0
    with_tokens: int = 0
    segments: int = 0
    calls: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    sampled_turns: int = 0
    untrained_samples: int = 0
    """Sampled tokens that came without a logprob: kept in the prompt, never trained."""
    checked: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.violations

    def violations_of(self, check: str) -> int:
        """How many times one check failed."""
        return sum(1 for v in self.violations if v.check == check)

    def add(self, record: RolloutRecord, line: int) -> None:
        self.rollouts += 1
        self.with_tokens += record.has_tokens
        self.sampled_turns += len(record.turns) or len(record.sampled_calls)
        self.segments += len(record.segments)
        self.calls += len(record.sampled_calls)
        self.tokens += sum(len(s.tokens) for s in record.segments)
        self.trained_tokens += sum(1 for s in record.segments for mask in s.masks if mask != MASKED)
        self.untrained_samples += sum(c.logprobs.count(NO_LOGPROB) for c in record.sampled_calls)
        for name, check in CHECKS.items():
            self.checked[name] += 1
            found = (Violation(record.rollout_id, line, name, message) for message in check(record))
            self.violations.extend(found)


def read_records(lines: Iterable[bytes]) -> Iterator[tuple[int, RolloutRecord]]:
    """Records with their line numbers; raises ValueError naming the first line that is not a record."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, RolloutRecord.from_json(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error


def verify(source: str | Path | Iterable[bytes]) -> Report:
    """Check every rollout of a rollouts.jsonl, given by its path or as lines."""
    report = Report()
    with nullcontext(source) if not isinstance(source, str | Path) else Path(source).open("rb") as lines:
        for number, record in read_records(lines):
            report.add(record, number)
    return report
