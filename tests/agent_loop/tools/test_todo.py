"""The todo list: replace, merge by id, order kept, bad items refused and nothing changed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.tools.todo import MAX_ITEMS, TodoList
from agent_loop.tools.tool import InvalidArguments


def item(item_id, content="do it", status="pending"):
    return {"id": item_id, "content": content, "status": status}


def test_an_empty_list_has_counts():
    summary = {"total": 0, "pending": 0, "in_progress": 0, "completed": 0, "cancelled": 0}
    assert TodoList().snapshot() == {"todos": [], "summary": summary}


def test_replacing_starts_over():
    todo = TodoList()
    todo.replace([item("1"), item("2")])
    todo.replace([item("3", status="in_progress")])
    assert todo.snapshot()["todos"] == [item("3", status="in_progress")]
    assert todo.snapshot()["summary"]["in_progress"] == 1


def test_merging_updates_fields_and_appends():
    todo = TodoList()
    todo.replace([item("1", "one"), item("2", "two")])
    todo.merge([{"id": "1", "status": "completed"}, item("3", "three"), {"id": "2", "content": "TWO", "status": None}])
    assert todo.snapshot()["todos"] == [item("1", "one", "completed"), item("2", "TWO"), item("3", "three")]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"content": "x"}, "needs an id"),
        ({"id": " ", "content": "x"}, "needs an id"),
        ({"id": "1"}, "needs content"),
        ({"id": "1", "content": "x", "status": "done"}, "valid: pending"),
    ],
)
@pytest.mark.parametrize("write", ["replace", "merge"])
def test_a_bad_item_is_refused_and_nothing_changes(bad, said, write):
    todo = TodoList()
    todo.replace([item("9")])
    with pytest.raises(InvalidArguments, match=said):
        getattr(todo, write)([item("8"), bad])
    assert todo.snapshot()["todos"] == [item("9")]


def test_the_list_is_limited():
    with pytest.raises(InvalidArguments, match="at most"):
        TodoList().replace([item(str(n)) for n in range(MAX_ITEMS + 1)])


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from("abcd"), max_size=4)), max_size=6))
def test_ids_stay_unique_and_counts_add_up(writes):
    todo = TodoList()
    for merge, ids in writes:
        (todo.merge if merge else todo.replace)([item(i) for i in ids])
    state = todo.snapshot()
    ids = [entry["id"] for entry in state["todos"]]
    assert len(ids) == len(set(ids)) == state["summary"]["total"] == state["summary"]["pending"]
