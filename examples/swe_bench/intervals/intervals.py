"""Sets of whole numbers as half-open intervals."""

Interval = tuple[int, int]


def merged(intervals: list[Interval]) -> list[Interval]:
    """The same set, in order, with as few intervals as possible."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start < found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def without(intervals: list[Interval], hole: Interval) -> list[Interval]:
    """The set without the numbers of one interval."""
    found = []
    for start, end in merged(intervals):
        found += [(start, min(end, hole[0])), (max(start, hole[1]), end)]
    return [(start, end) for start, end in found if start < end]
