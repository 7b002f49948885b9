"""Faults that no ledger can see: the record is consistent in itself, but not with what the model was given."""

from __future__ import annotations

import copy
from collections.abc import Callable

from agent_loop.records.record import RolloutRecord


def _calls_after(record: RolloutRecord, first: int) -> list:
    """Calls of segment 0 from the one that follows call `first` on."""
    return [c for c in record.sampled_calls if c.segment == 0][first + 1 :]


def double_end(record: RolloutRecord) -> None:
    """The end-of-turn token stands twice after the first turn, in the segment and in the log."""
    call = record.sampled_calls[0]
    at = len(call.prompt_ids) + len(call.sampled_ids)
    segment = record.segments[0]
    end = call.sampled_ids[-1] if call.finish_reason == "stop" else segment.tokens[at]  # cut short: the glue wrote it
    for values, value in ((segment.tokens, end), (segment.masks, -100), (segment.logprobs, 1.0)):
        values.insert(at, value)
    for later in _calls_after(record, 0):
        later.prompt_ids.insert(at, end)


def drop_glue(record: RolloutRecord) -> None:
    """The first token of the glue after the first turn is gone, in the segment and in the log."""
    call = record.sampled_calls[0]
    at = len(call.prompt_ids) + len(call.sampled_ids)
    segment = record.segments[0]
    for values in (segment.tokens, segment.masks, segment.logprobs):
        del values[at]
    for later in _calls_after(record, 0):
        del later.prompt_ids[at]


def shift_logprob(record: RolloutRecord) -> None:
    """The logprobs of the first turn stand one place too far left, in the segment and in the log."""
    call = record.sampled_calls[0]
    start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.sampled_ids)
    call.logprobs[:] = [*call.logprobs[1:], call.logprobs[0]]
    record.segments[0].logprobs[start:end] = call.logprobs


CONSISTENT_FAULTS: tuple[Callable[[RolloutRecord], None], ...] = (double_end, drop_glue, shift_logprob)


def corrupted(record: RolloutRecord, fault: Callable[[RolloutRecord], None]) -> RolloutRecord:
    """A copy with the fault put in."""
    broken = copy.deepcopy(record)
    fault(broken)
    return broken


def follows_itself(record: RolloutRecord) -> bool:
    """Whether the first segment has a turn of some length that was followed by another."""
    first = [c for c in record.sampled_calls if c.segment == 0]
    return len(first) > 1 and all(len(c.sampled_ids) > 3 for c in first[:2])
