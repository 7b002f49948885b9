"""Rows into padded arrays of few shapes, because every new shape is a compilation of several seconds.

What rows have in common is computed once. The beginning that all rows of the step share (instructions, examples) is the
`prefix`; what the rows of a group share after it (the task) is a segment of its own, the parent of theirs. A row is
prefix + parent + its own segment. Rows with the same tokens, ever more of them as a model learns, share the segment.
Padding comes after the tokens of a segment, where no token sees it, and trains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from environments.apps.reference_trainer.rows import Floats, Ints, TrainingRow

PREFIX_STEP = 32
SEGMENTS_STEP = 12
"""Four groups of eight different rows are 36 segments: no padding for the usual batch."""


class Microbatch(NamedTuple):
    """What the compiled step takes. The last five have one entry per trained token of all rows together."""

    prefix: Ints
    """[P]: the beginning of every row."""
    segments: Ints
    """[B, S]: what follows."""
    parents: Ints
    """[B]: the segment between the prefix and this one."""
    parent_lengths: Ints
    """[B]: 0 when there is none between."""
    places: Ints
    """[M]: places of the logits that chose the tokens, counted through the prefix and all segments."""
    targets: Ints
    recorded: Floats
    """The sampler's logprobs."""
    advantages: Floats
    valid: Floats
    """1, or 0 for padding."""


def microbatches(rows: Sequence[TrainingRow], max_segments: int, share: bool = True) -> list[Microbatch]:
    """All rows; groups stay together, and those of similar length come next to each other."""
    prefix = shared_length(rows) // PREFIX_STEP * PREFIX_STEP if rows and share else 0
    by_group = [list(group) for _, group in groupby(sorted(rows, key=lambda r: r.group), key=lambda r: r.group)]
    by_group.sort(key=lambda group: max(len(row.tokens) for row in group))
    parts = [group[i : i + max_segments - 1] for group in by_group for i in range(0, len(group), max_segments - 1)]
    batches: list[list[TrainingRow]] = []
    room = 0
    for part in parts:
        needed = 1 + (len({row.tokens.tobytes() for row in part}) if share else len(part))
        if needed > room:
            batches.append([])
            room = max_segments
        batches[-1] += part
        room -= needed
    return [_padded(batch, prefix, share) for batch in batches]


def shared_length(rows: Sequence[TrainingRow]) -> int:
    """How many tokens all rows share before the first sampled one."""
    first = rows[0].tokens[: min(int(row.trained[0]) for row in rows)]
    for row in rows[1:]:
        differs = np.flatnonzero(row.tokens[: len(first)] != first)
        first = first[: differs[0]] if len(differs) else first
    return len(first)


def padded_length(length: int) -> int:
    """The next of 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, ...: few lengths, and little padding."""
    step = max(8, 1 << max(0, (length - 1).bit_length() - 3))
    return max(step, -(-length // step) * step)


class _Segments:
    """Segments of a microbatch as they are collected; `places` says where the tokens of a row are among them."""

    def __init__(self, rows: Sequence[TrainingRow], prefix: int, share: bool) -> None:
        self.tokens: list[Ints] = []
        self.parents: list[int] = []
        self._cuts: list[tuple[int, int]] = []
        for _, members in groupby(rows, key=lambda row: row.group):
            group = list(members)
            cut = shared_length(group) if share and len(group) > 1 else prefix
            parent = self._add(group[0].tokens[prefix:cut], len(self.tokens)) if cut > prefix else None
            known: dict[bytes, int] = {}
            for row in group:
                # The last token of a row is only a target.
                tokens = row.tokens[cut:-1]
                own = known.get(tokens.tobytes()) if share else None
                if own is None:
                    own = self._add(tokens, len(self.tokens) if parent is None else parent)
                    known[tokens.tobytes()] = own
                self._cuts.append((own, cut))
        self._prefix = prefix

    def places(self, number: int, row: TrainingRow, length: int) -> np.ndarray:
        """Of the logits that chose the trained tokens of a row, with segments padded to `length`."""
        at = row.trained - 1
        segment, cut = self._cuts[number]
        own = self._prefix + segment * length + at - cut
        shared = self._prefix + self.parents[segment] * length + at - self._prefix
        return np.where(at >= cut, own, np.where(at >= self._prefix, shared, at))

    def _add(self, tokens: Ints, parent: int) -> int:
        self.tokens.append(tokens)
        self.parents.append(parent)
        return len(self.tokens) - 1


def _padded(rows: Sequence[TrainingRow], prefix: int, share: bool) -> Microbatch:
    segments = _Segments(rows, prefix, share)
    height = -(-len(segments.tokens) // SEGMENTS_STEP) * SEGMENTS_STEP
    length = padded_length(max(map(len, segments.tokens)))
    tokens = np.zeros((height, length), np.int32)
    parents = np.arange(height, dtype=np.int32)
    parent_lengths = np.zeros(height, np.int32)
    for i, (own, parent) in enumerate(zip(segments.tokens, segments.parents, strict=True)):
        tokens[i, : len(own)] = own
        parents[i] = parent
        parent_lengths[i] = len(segments.tokens[parent]) if parent != i else 0
    trained = [row.trained for row in rows]
    count = sum(map(len, trained))
    quarter = height * length // 4
    pad = -count % quarter

    def flat(per_row: Sequence[np.ndarray], dtype: type) -> np.ndarray:
        return np.pad(np.concatenate(per_row).astype(dtype), (0, pad))

    return Microbatch(
        prefix=rows[0].tokens[:prefix],
        segments=tokens,
        parents=parents,
        parent_lengths=parent_lengths,
        places=flat([segments.places(i, row, length) for i, row in enumerate(rows)], np.int32),
        targets=flat([row.labels[at] for row, at in zip(rows, trained, strict=True)], np.int32),
        recorded=flat([row.logprobs[at] for row, at in zip(rows, trained, strict=True)], np.float32),
        advantages=flat([row.advantages[at] for row, at in zip(rows, trained, strict=True)], np.float32),
        valid=np.pad(np.ones(count, np.float32), (0, pad)),
    )
