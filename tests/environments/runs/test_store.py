"""A run on disk survives crashes at any byte, and is never a mix of two runs."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from environments.runs.store import RunDiffers, RunInUse, RunStore, append_bytes
from support.env_records import record

CONFIG = {"env": {"group_size": 2, "seed": 1}}


def write_groups(directory: Path, *indices: int) -> None:
    with RunStore(directory, CONFIG) as store:
        for index in indices:
            store.add_group(index, f"item-{index}", [record(f"g{index}", n) for n in range(2)])


def test_finished_groups_are_found_again(tmp_path: Path) -> None:
    write_groups(tmp_path, 0, 2)
    with RunStore(tmp_path, CONFIG) as store:
        assert dict(store.finished) == {0: "item-0", 2: "item-2"}
        assert [r.rollout_id for r in store.records()] == ["g0/0", "g0/1", "g2/0", "g2/1"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40)
@given(cut_rollouts=st.integers(0, 2000), cut_groups=st.integers(0, 200))
def test_a_crash_at_any_byte_leaves_whole_groups_only(tmp_path: Path, cut_rollouts: int, cut_groups: int) -> None:
    """Rollouts are flushed before the group's line: cut either file anywhere in that order."""
    directory = tmp_path / f"{cut_rollouts}-{cut_groups}"
    write_groups(directory, 0, 1, 2)
    groups = directory / "groups.jsonl"
    groups.write_bytes(groups.read_bytes()[:cut_groups])
    whole = groups.read_bytes().count(b"\n")
    rollouts = directory / "rollouts.jsonl"
    lines = rollouts.read_bytes().splitlines(keepends=True)
    flushed = b"".join(lines[: 2 * whole])
    rollouts.write_bytes(flushed + b"".join(lines[2 * whole :])[:cut_rollouts])
    with RunStore(directory, CONFIG) as store:
        assert sorted(store.finished) == list(range(whole))
        assert len(list(store.records())) == 2 * whole
        store.add_group(9, "item-9", [record("g9")])
    with RunStore(directory, CONFIG) as store:
        assert [r.group_id for r in store.records()][-1] == "g9"


def test_incomplete_groups_are_kept_for_the_summary_and_tried_again(tmp_path: Path) -> None:
    with RunStore(tmp_path, CONFIG) as store:
        store.add_group(0, "item-0", [record("g0", score=None)], complete=False)
        assert len(list(store.records())) == 1
    with RunStore(tmp_path, CONFIG) as store:
        assert dict(store.finished) == {}
        assert list(store.records()) == []


def test_another_config_is_refused_by_name_unless_fresh(tmp_path: Path) -> None:
    write_groups(tmp_path, 0)
    other = {"env": {"group_size": 4, "seed": 1}}
    with pytest.raises(RunDiffers, match=r"another env\.group_size \(2, now 4\)"), RunStore(tmp_path, other):
        pass
    with RunStore(tmp_path, other, resume=False) as store:
        assert dict(store.finished) == {}
        assert list(store.records()) == []


def test_rollouts_of_something_else_are_not_overwritten_unless_fresh(tmp_path: Path) -> None:
    foreign = record("demo").to_json() + b"\n"
    (tmp_path / "rollouts.jsonl").write_bytes(foreign)
    with pytest.raises(RunDiffers, match="was not written by process or evaluate"), RunStore(tmp_path, CONFIG):
        pass
    assert (tmp_path / "rollouts.jsonl").read_bytes() == foreign
    with RunStore(tmp_path, CONFIG, resume=False) as store:
        assert list(store.records()) == []


def test_a_folder_made_for_a_run_that_stored_nothing_goes(tmp_path: Path) -> None:
    with RunStore(tmp_path / "new", CONFIG):
        pass
    assert not (tmp_path / "new").exists()
    write_groups(tmp_path / "new", 0)
    assert (tmp_path / "new" / "rollouts.jsonl").exists()


def test_an_unfinished_run_may_change_its_config(tmp_path: Path) -> None:
    write_groups(tmp_path)
    with RunStore(tmp_path, {"env": {}}) as store:
        assert dict(store.finished) == {}


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    with RunStore(tmp_path, CONFIG), pytest.raises(RunInUse, match="another process"), RunStore(tmp_path, CONFIG):
        pass
    write_groups(tmp_path, 0)


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"

    def write(letter: bytes) -> None:
        for _ in range(25):
            append_bytes(path, letter * 200_000 + b"\n")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, (b"a", b"b", b"c", b"d")))
    assert Counter(path.read_bytes().splitlines()) == {letter * 200_000: 25 for letter in (b"a", b"b", b"c", b"d")}


def test_a_torn_line_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    append_bytes(path, b'{"n": 1}\n')
    with path.open("ab") as file:
        file.write(b'{"n": ')  # a process was killed here, or the disk was full
    append_bytes(path, b'{"n": 2}\n')
    append_bytes(path, b'{"n": 3}\n')
    assert path.read_bytes() == b'{"n": 1}\n{"n": \n{"n": 2}\n{"n": 3}\n'
