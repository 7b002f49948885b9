from intervals import merged, without


def test_overlapping_ones_are_merged() -> None:
    assert merged([(5, 9), (1, 6)]) == [(1, 9)]


def test_one_inside_another_is_gone() -> None:
    assert merged([(1, 9), (2, 3)]) == [(1, 9)]


def test_distant_ones_stay() -> None:
    assert merged([(1, 2), (4, 5)]) == [(1, 2), (4, 5)]


def test_a_hole_splits() -> None:
    assert without([(0, 10)], (3, 5)) == [(0, 3), (5, 10)]
