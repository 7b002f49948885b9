"""Is this group fit for a trainer? Checked in full before anything is sent, because run-api checks almost nothing.

A group is a dict in atroposlib's ScoredDataGroup shape. `check_group` raises `GroupRejected` with a countable reason;
what passes has exactly the registered number of sequences, equal lengths, plain finite numbers, masks that are either
-100 or the token itself, and a logprob for every trained token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agent_loop.model.tokens.ledger import MASKED, NO_LOGPROB

Group = dict[str, Any]
"""tokens, masks, scores, inference_logprobs; optional advantages, messages, overrides, generation_params, ..."""

Reason = Literal[
    "size",
    "shape",
    "types",
    "not_finite",
    "masks",
    "logprobs",
    "untrained",
    "too_long",
    "no_signal",
    "messages",
    "segments",
]

ROW_KEYS = ("tokens", "masks", "inference_logprobs", "advantages", "ref_logprobs")


class GroupRejected(Exception):
    """This group must not reach a trainer; `reason` is for counting, the message for reading."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


def check_group(
    group: Mapping[str, Any], group_size: int, max_token_len: int = -1, scores_must_differ: bool = False
) -> None:
    """Raise GroupRejected unless the group can be trained on as it stands. Pure and slow: call it in a thread."""
    _check_size(group, group_size)
    _check_scores(group["scores"], scores_must_differ)
    for row in range(group_size):
        _check_row(group, row, max_token_len)
    _check_messages(group.get("messages"), group_size)


def _check_size(group: Mapping[str, Any], group_size: int) -> None:
    for key in ("tokens", "masks", "scores", "inference_logprobs"):
        if not isinstance(group.get(key), list):
            raise GroupRejected("shape", f"the group has no list of {key}")
    for key in (*ROW_KEYS, "scores", "overrides"):
        rows = group.get(key)
        if rows is not None and len(rows) != group_size:
            raise GroupRejected("size", f"{len(rows)} {key} in a group of {group_size}")


def _check_scores(scores: Sequence[Any], must_differ: bool) -> None:
    if wrong := [s for s in scores if type(s) not in (int, float)]:
        raise GroupRejected("types", f"a score is {type(wrong[0]).__name__}, not a plain number")
    if not all(map(math.isfinite, scores)):
        raise GroupRejected("not_finite", f"scores {list(scores)} are not all finite")
    if must_differ and len(set(scores)) == 1:
        raise GroupRejected("no_signal", f"all {len(scores)} scores are {scores[0]}")


def _check_row(group: Mapping[str, Any], row: int, max_token_len: int) -> None:
    tokens, masks, logprobs = group["tokens"][row], group["masks"][row], group["inference_logprobs"][row]
    for key in ROW_KEYS:
        if group.get(key) is not None:
            _check_numbers(
                key, row, group[key][row], len(tokens), {int} if key in ("tokens", "masks") else {int, float}
            )
    if not tokens:
        raise GroupRejected("untrained", f"sequence {row} is empty")
    if 0 < max_token_len <= len(tokens):
        raise GroupRejected(
            "too_long", f"sequence {row} has {len(tokens)} tokens; the trainer takes fewer than {max_token_len}"
        )
    if min(tokens) < 0:
        raise GroupRejected("types", f"sequence {row} has the token id {min(tokens)}")
    _check_training_marks(row, tokens, masks, logprobs)


def _check_numbers(key: str, row: int, values: Any, length: int, allowed: set[type]) -> None:
    if not isinstance(values, list) or len(values) != length:
        size = len(values) if isinstance(values, list) else type(values).__name__
        raise GroupRejected("shape", f"sequence {row} has {length} tokens but {size} {key}")
    if odd := set(map(type, values)) - allowed:
        raise GroupRejected("types", f"{key} of sequence {row} holds {odd.pop().__name__}, not plain numbers")
    if not all(map(math.isfinite, values)):
        raise GroupRejected("not_finite", f"{key} of sequence {row} are not all finite")


def _check_training_marks(row: int, tokens: list[int], masks: list[int], logprobs: list[float]) -> None:
    trained = 0
    for position, (token, mask, logprob) in enumerate(zip(tokens, masks, logprobs, strict=True)):
        if mask == MASKED:
            if logprob != NO_LOGPROB:
                raise GroupRejected(
                    "logprobs", f"position {position} of sequence {row} is masked but has logprob {logprob}"
                )
            continue
        if mask != token:
            raise GroupRejected(
                "masks", f"position {position} of sequence {row}: mask {mask} is neither -100 nor the token {token}"
            )
        if logprob > 0:
            raise GroupRejected(
                "logprobs", f"position {position} of sequence {row} is trained with logprob {logprob} > 0"
            )
        trained += 1
    if not trained:
        raise GroupRejected("untrained", f"sequence {row} trains no token")


def _check_messages(messages: Any, group_size: int) -> None:
    if messages is None:
        return
    if len(messages) != group_size:
        raise GroupRejected("size", f"{len(messages)} message lists in a group of {group_size}")
    for row, conversation in enumerate(messages):
        if any("role" not in message or "content" not in message for message in conversation):
            raise GroupRejected("messages", f"a message of sequence {row} has no role or no content key")
