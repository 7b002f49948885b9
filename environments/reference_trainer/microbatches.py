"""Rows into padded arrays of few shapes, because every new shape is a compilation of several seconds.

The beginning that all rows of a step share (instructions, examples) is computed once per microbatch instead of once per
row. Padding stands behind a row's tokens, where causal attention never looks, and trains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from environments.reference_trainer.rows import Floats, Ints, Row

PREFIX_STEP = 32
ROW_COUNTS = (4, 8, 16, 32, 64, 128)
SMALLEST_LENGTH = 16


class Microbatch(NamedTuple):
    """What the compiled step takes. The last four are one entry per trained token of all rows together."""

    prefix: Ints
    """[P]: the shared beginning, without any trained token."""
    suffixes: Ints
    """[R, S]: what follows it in each row."""
    places: Ints
    """[M]: where in the flattened suffixes the logits stand that chose the token."""
    targets: Ints
    recorded: Floats
    """The sampler's logprobs."""
    advantages: Floats
    valid: Floats
    """1, or 0 for padding."""


def shared_prefix(rows: Sequence[Row]) -> int:
    """Length of the beginning that all rows have in common and that chooses no trained token; a multiple of 32."""
    # The logits at place i - 1 choose the token at place i: they must stay outside of the prefix.
    limit = min(int(row.trained[0]) - 1 for row in rows)
    first = rows[0].tokens[:limit]
    for row in rows[1:]:
        differs = np.flatnonzero(row.tokens[: len(first)] != first)
        first = first[: differs[0]] if len(differs) else first
    return len(first) // PREFIX_STEP * PREFIX_STEP


def microbatches(rows: Sequence[Row], max_rows: int, share_prefix: bool = True) -> list[Microbatch]:
    """All rows, the like-long ones together."""
    if not rows:
        return []
    prefix = shared_prefix(rows) if share_prefix else 0
    ordered = sorted(rows, key=lambda row: len(row.tokens))
    return [_padded(ordered[i : i + max_rows], prefix, max_rows) for i in range(0, len(ordered), max_rows)]


def _padded(rows: Sequence[Row], prefix: int, max_rows: int) -> Microbatch:
    height = min([count for count in ROW_COUNTS if len(rows) <= count < max_rows], default=max_rows)
    # The last token of a row chooses nothing: it is only ever a target.
    length = padded_length(max(len(row.tokens) for row in rows) - 1 - prefix)
    suffixes = np.zeros((height, length), np.int32)
    trained = [row.trained for row in rows]
    places = []
    for i, row in enumerate(rows):
        own = row.tokens[prefix:-1]
        suffixes[i, : len(own)] = own
        places.append(i * length + trained[i] - 1 - prefix)
    count = sum(map(len, trained))
    # Padded per row, so that the number of shapes does not grow with the number of trained tokens.
    pad = height * padded_length(-(-count // height)) - count

    def flat(per_row: Sequence[np.ndarray], dtype: type) -> np.ndarray:
        return np.pad(np.concatenate(per_row).astype(dtype), (0, pad))

    return Microbatch(
        prefix=rows[0].tokens[:prefix],
        suffixes=suffixes,
        places=flat(places, np.int32),
        targets=flat([row.labels[at] for row, at in zip(rows, trained, strict=True)], np.int32),
        recorded=flat([row.logprobs[at] for row, at in zip(rows, trained, strict=True)], np.float32),
        advantages=flat([row.advantages[at] for row, at in zip(rows, trained, strict=True)], np.float32),
        valid=np.pad(np.ones(count, np.float32), (0, pad)),
    )


def padded_length(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, 96, 128, ...: at most half is padding, and few lengths occur."""
    size = SMALLEST_LENGTH
    while size < length:
        half_more = size + size // 2
        if length <= half_more:
            return half_more
        size *= 2
    return size
