"""What the page shows of one rollout: an index entry for lists and charts, the conversation, and the tokens.

All matching (turns to messages, results to calls, tokens to turns) happens here, so that the page only has to display.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from agent_loop.model.tokens.ledger import MASKED, NO_LOGPROB
from agent_loop.records.record import RolloutRecord, SampledCall
from environments.atropos.advantages import Baseline, centered, turn_advantages
from environments.runs.summary import FULL_SCORE, TIME_PARTS, classify

PREVIEW_CHARS = 140
NOTHING: tuple[Any, ...] = (None, "", [], {})


def index_entry(record: RolloutRecord) -> dict[str, Any]:
    """One row of the list; small, because all of them are read when the page opens."""
    asked = next((text_of(m.get("content")) for m in reversed(record.messages) if m.get("role") == "user"), "")
    statuses: dict[str, int] = {}
    for call in record.tool_calls:
        status = str(call.get("status", "?"))
        statuses[status] = statuses.get(status, 0) + 1
    return {
        "id": record.rollout_id,
        "item": record.item_id,
        "group": record.group_id,
        "policy": record.policy or "(none)",
        "category": record.category or "(none)",
        "outcome": record.outcome,
        "trainable": record.trainable,
        "score": record.score,
        "verifier": record.verifier_score,
        "solved": record.verifier_score is not None and record.verifier_score >= FULL_SCORE,
        "cause": classify(record),
        "turns": len(record.turns),
        "calls": statuses,
        "repaired": sum(bool(call.get("repairs")) for call in record.tool_calls),
        "truncations": len(record.truncations),
        "time": [record.timing.get(part, 0.0) for part in TIME_PARTS] + [record.timing.get("total_s", 0.0)],
        "tokens": record.metrics.get("sampled_tokens", 0.0),
        "asked": asked[:PREVIEW_CHARS],
        "weights": next((call.weights_version for call in record.sampled_calls if call.weights_version), ""),
        "turn_scores": record.turn_scores,
        "turn_rewards": record.turn_rewards,
    }


def add_advantages(entries: Sequence[dict[str, Any]], baseline: Baseline) -> None:
    """Give each index entry the advantage of its rollout in its group, and of its turns where they have rewards."""
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        if entry["trainable"] and entry["score"] is not None:
            groups[entry["group"]].append(entry)
    for members in groups.values():
        own = centered([entry["score"] for entry in members], baseline)
        turns = turn_advantages([entry["turn_rewards"] for entry in members], baseline)
        for entry, outcome, per_turn in zip(members, own, turns, strict=True):
            entry["advantage"] = outcome
            entry["turn_advantages"] = [outcome + value for value in per_turn]


def detail(record: RolloutRecord, max_chars: int, with_tokens: bool = True) -> dict[str, Any]:
    """Everything about one rollout; texts longer than `max_chars` lose their middle."""
    trained = sum(1 for segment in record.segments for mask in segment.masks if mask != MASKED)
    return {
        "id": record.rollout_id,
        "facts": [
            ["item", record.item_id],
            ["group", record.group_id],
            ["environment", record.environment],
            ["seed", "" if record.seed is None else str(record.seed)],
            ["isolation", record.isolation],
            ["hosts asked for", "; ".join(map(_host_asked, record.network))],
            ["segments", f"{len(record.segments)}, {trained} trained tokens" if record.has_tokens else "no tokens"],
        ],
        "error": record.error,
        "components": sorted(record.reward_components.items(), key=lambda pair: (pair[0] != "verifier", pair[0])),
        "metrics": sorted(record.metrics.items()),
        "tools": [str(tool.get("function", {}).get("name", "?")) for tool in record.tools],
        "entries": conversation(record, max_chars),
        "end_state": {path: cut(text, max_chars) for path, text in record.end_state.items()},
        "tokens": [tokens_of(record, index) for index in range(len(record.segments))] if with_tokens else [],
    }


def _host_asked(entry: Mapping[str, Any]) -> str:
    result = "" if entry.get("allowed") else f", refused: {entry.get('reason')}"
    phase = " in prepare" if entry.get("phase") == "prepare" else ""
    return f"{entry.get('host')}:{entry.get('port')} x {entry.get('count')}{phase}{result}"


def conversation(record: RolloutRecord, max_chars: int) -> list[dict[str, Any]]:
    """Messages in order, each sampled turn with its times and calls, each call with its result."""
    turn_of = _sampled_turns(record)
    results = {
        str(m.get("tool_call_id")): m for m in record.messages if m.get("role") == "tool" and m.get("tool_call_id")
    }
    shown: set[str] = set()
    entries: list[dict[str, Any]] = []
    for place, message in enumerate(record.messages):
        turn = turn_of.get(place)
        if turn is not None:
            entries += [_truncation(t) for t in record.truncations if t.get("turn") == turn.get("turn")]
        if message.get("role") == "tool" and str(message.get("tool_call_id")) in shown:
            continue
        calls = _calls(record, message, turn, results, max_chars)
        shown |= {call["id"] for call in calls if call["result"] is not None}
        entries.append(
            {
                "role": str(message.get("role", "?")),
                "text": cut(text_of(message.get("content")), max_chars),
                "reasoning": cut(text_of(message.get("reasoning_content")), max_chars),
                "turn": turn,
                "calls": calls,
            }
        )
    return entries


GIVEN, GLUE, SAMPLED = "given", "glue", "sampled"


def tokens_of(record: RolloutRecord, index: int) -> dict[str, Any]:
    """One segment as the page draws it.

    `spans` are [end, kind, turn, weights]: `given` is text of messages, `glue` is what the chat template wrote around
    it, `sampled` is the model's. `logprobs` are those of sampled tokens in order, null where the server gave none;
    so are `entropies`, which are there only where a server told any.
    `trained` are the ends of stretches by turns masked and trained, the first of them masked.
    """
    segment = record.segments[index]
    spelled = {int(token): _bytes(piece) for token, piece in record.pieces.items()}
    spans: list[list[Any]] = []
    logprobs: list[float | None] = []
    entropies: list[float | None] = []
    done = 0
    for turn, call in enumerate(record.sampled_calls, 1):
        if call.segment != index:
            continue
        start = len(call.prompt_ids)
        spans += _given_spans(record, turn, [spelled.get(token, b"") for token in segment.tokens[done:start]], done)
        spans += ([start + end, SAMPLED, turn, version] for end, version in _weights(call))
        logprobs += (None if p == NO_LOGPROB else round(p, 4) for p in call.logprobs)
        entropies += (None if e is None else round(e, 3) for e in call.entropies or [None] * len(call.sampled_ids))
        done = start + len(call.sampled_ids)
    told = {} if all(entropy is None for entropy in entropies) else {"entropies": entropies}
    return {"ids": segment.tokens, "spans": spans, "logprobs": logprobs, "trained": _stretches(segment.masks), **told}


def _weights(call: SampledCall) -> Iterator[tuple[int, str]]:
    if call.weights_spans:
        yield from ((span.end, span.version) for span in call.weights_spans)
    else:
        yield len(call.sampled_ids), call.weights_version or ""


def _stretches(masks: Sequence[int]) -> list[int]:
    """Where masked and trained positions take turns, from position 0 on as masked."""
    ends, trained = [], False
    for position, mask in enumerate(masks):
        if (mask != MASKED) != trained:
            ends.append(position)
            trained = not trained
    return [*ends, len(masks)]


def _given_spans(record: RolloutRecord, turn: int, pieces: Sequence[bytes], offset: int) -> Iterator[list[Any]]:
    """What stands before a sampled turn, taken apart into texts of messages and the template's own words.

    The texts are looked for in order. Where one is not to be found (a template may change it, truncation shortens it)
    nobody can tell where it ends, and the whole stretch counts as given.
    """
    if not pieces:
        return
    whole = b"".join(pieces)
    ends = list(accumulate(map(len, pieces)))
    cursor = last = 0
    spans: list[list[Any]] = []
    for text in _texts_before(record, turn, offset > 0):
        at = whole.find(text, cursor)
        if at < 0 or not record.pieces:
            yield [offset + len(pieces), GIVEN, turn, ""]
            return
        cursor = at + len(text)
        first, after = bisect_right(ends, at), bisect_right(ends, cursor - 1) + 1
        spans += [[offset + first, GLUE, turn, ""]] if first > last else []
        spans.append([offset + after, GIVEN, turn, ""])
        last = max(last, after)
    yield from spans
    if last < len(pieces):
        yield [offset + len(pieces), GLUE, turn, ""]


def _bytes(piece: Any) -> bytes:
    return piece.encode() if isinstance(piece, str) else bytes(piece or ())


def _texts_before(record: RolloutRecord, turn: int, goes_on: bool) -> list[bytes]:
    """Texts of the messages between the turn before (or the beginning) and this one, as templates write them."""
    places = {call: place for place, call in enumerate(record.sampled_by) if call is not None}
    end = places.get(turn - 1, 0)
    start = places.get(turn - 2, -1) + 1 if goes_on else 0
    texts = (text_of(message.get("content")).strip() for message in record.messages[start:end])
    return [text.encode() for text in texts if text]


def _sampled_turns(record: RolloutRecord) -> dict[int, Mapping[str, Any]]:
    """Place of a message -> its turn record. Assistant messages before the first turn are examples of the prompt."""
    places = [place for place, message in enumerate(record.messages) if message.get("role") == "assistant"]
    sampled = places[-len(record.turns) :] if record.turns else []
    return dict(zip(sampled, record.turns[-len(sampled) :] if sampled else [], strict=True))


def _calls(
    record: RolloutRecord,
    message: Mapping[str, Any],
    turn: Mapping[str, Any] | None,
    results: Mapping[str, Mapping[str, Any]],
    max_chars: int,
) -> list[dict[str, Any]]:
    wire = {str(call.get("id")): call.get("function", {}) for call in message.get("tool_calls") or []}
    number = turn.get("turn") if turn is not None else None
    records = [call for call in record.tool_calls if number is not None and call.get("turn") == number]
    known = {str(call.get("call_id")) for call in records}
    unrecorded: list[Mapping[str, Any]] = [
        {"call_id": call_id, "name": function.get("name", "?"), "raw_arguments": function.get("arguments")}
        for call_id, function in wire.items()
        if call_id not in known
    ]
    return [_call(call, results.get(str(call.get("call_id"))), max_chars) for call in [*records, *unrecorded]]


def _call(call: Mapping[str, Any], result: Mapping[str, Any] | None, max_chars: int) -> dict[str, Any]:
    raw, arguments = as_text(call.get("raw_arguments")), as_text(call.get("arguments"))
    repaired = [str(name) for name in call.get("repairs") or ()]
    return {
        "id": str(call.get("call_id")),
        "name": str(call.get("name", "?")),
        "status": str(call.get("status", "")),
        "arguments": cut(arguments or raw, max_chars),
        "written": cut(raw, max_chars) if repaired or not arguments else None,
        "repairs": repaired,
        "duplicate": bool(call.get("duplicate")),
        "nested": call.get("parent") is not None,
        "duration_s": call.get("duration_s"),
        "exit_code": call.get("exit_code"),
        "error": call.get("error"),
        "stored": f"{call.get('result_chars')} characters in all, kept at {call['stored_path']}"
        if call.get("stored_path")
        else None,
        "result": cut(readable(text_of(result.get("content"))), max_chars) if result is not None else None,
    }


def _truncation(entry: Mapping[str, Any]) -> dict[str, Any]:
    said = ", ".join(f"{key.replace('_', ' ')} {as_text(value)}" for key, value in entry.items() if key != "turn")
    return {"role": "truncation", "text": f"Context truncated before turn {entry.get('turn')}: {said}", "calls": []}


def text_of(content: Any) -> str:
    """Text of a message's content, whichever of the allowed shapes it has."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(
            part.get("text") or f"[{part.get('type', 'part')}]" for part in content if isinstance(part, dict)
        )
    return as_text(content)


def readable(result: str) -> str:
    """A tool's JSON result as people read it: its output with real line ends, then whatever else it says."""
    try:
        data = json.loads(result)
    except (ValueError, RecursionError):
        return result
    fields = data if isinstance(data, dict) else {}
    main = next((key for key in ("output", "content") if isinstance(fields.get(key), str)), None)
    if main is None:
        return result
    shown = (main, "exit_code")  # the exit code is shown with the call
    rest = [f"{key}: {as_text(value)}" for key, value in fields.items() if key not in shown and value not in NOTHING]
    return "\n".join(part for part in (fields[main].rstrip("\n"), *rest) if part)


def as_text(value: Any) -> str:
    """A string as it is, a one-string object as that string, anything else as indented JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, dict) and len(value) == 1 and isinstance(only := next(iter(value.values())), str):
        return only
    return json.dumps(value, ensure_ascii=False, indent=2, default=str)


def cut(text: str, max_chars: int) -> str:
    """The text, or its head and tail around a note of what is left out."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out of this page ...]\n{text[-half:]}"
