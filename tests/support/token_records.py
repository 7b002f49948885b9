"""Records with real tokens: conversations of `support.records` written in ChatML, and a real tokenizer's ids."""

from __future__ import annotations

from random import Random

from agent_loop.local_models.standin import chatml_tokenizer
from agent_loop.model.contract import Segment, WeightsSpan
from agent_loop.model.tokens.ledger import MASKED, NO_LOGPROB, Vocabulary
from agent_loop.records.record import RolloutRecord, SampledCall


def tokenized(record: RolloutRecord, *, restart_before: int | None = None, weights: str = "7") -> RolloutRecord:
    """The record with segments, calls and pieces; a new segment before turn `restart_before` (1-based)."""
    tokenizer, rng = chatml_tokenizer(), Random(record.rollout_id)
    segments = [Segment([], [], [])]
    calls: list[SampledCall] = []
    record.sampled_by = []

    def give(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        segments[-1].tokens.extend(ids)
        segments[-1].masks.extend([MASKED] * len(ids))
        segments[-1].logprobs.extend([NO_LOGPROB] * len(ids))

    for place, message in enumerate(record.messages):
        if message["role"] != "assistant":
            give(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n")
            record.sampled_by.append(None)
            continue
        if restart_before == len(calls) + 1:
            segments.append(Segment([], [], []))
            for earlier in record.messages[:2]:
                give(f"<|im_start|>{earlier['role']}\n{earlier['content']}<|im_end|>\n")
        give("<|im_start|>assistant\n")
        record.sampled_by.append(len(calls))
        record.turns[len(calls)]["message"] = place
        ids = tokenizer.encode(f"{message['content']}<|im_end|>", add_special_tokens=False)
        logprobs = [round(-rng.expovariate(1.0), 3) for _ in ids]
        spans = [WeightsSpan(weights, 0, 2), WeightsSpan(f"{weights}b", 2, len(ids))]
        prompt = list(segments[-1].tokens)
        # The first turn was sampled by a server that told no entropies, as when a run goes on with another one.
        told = [round(rng.uniform(0, 4), 3) for _ in ids] if calls else []
        calls.append(SampledCall(len(segments) - 1, prompt, ids, logprobs, "stop", 0.8, weights, spans, entropies=told))
        segments[-1].tokens.extend(ids)
        segments[-1].masks.extend(ids)
        segments[-1].logprobs.extend(logprobs)
        give("\n")
    for segment in segments:  # a segment ends with its last sampled token
        while segment.masks and segment.masks[-1] == MASKED:
            for part in (segment.tokens, segment.masks, segment.logprobs):
                part.pop()
    record.segments, record.sampled_calls = segments, calls
    record.pieces = Vocabulary(tokenizer).pieces(token for s in segments for token in s.tokens)
    record.metrics["sampled_tokens"] = float(sum(len(call.sampled_ids) for call in calls))
    return record
