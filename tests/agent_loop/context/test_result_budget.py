"""Result budgets: per result and per turn, the whole kept at a path, JSON never broken."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from agent_loop.context.result_budget import MIN_CHARS, ResultBudget, Store, apply_budget
from agent_loop.turn.tool_call import ToolCallRecord
from sandbox_pool.errors import SandboxLost


class Shelf:
    """Keeps what is stored."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    async def store(self, text: str) -> str | None:
        path = f"/results/{len(self.kept)}"
        self.kept[path] = text
        return path


async def budgeted(results: list[tuple[str, str]], budget: ResultBudget, store: Store) -> list[ToolCallRecord]:
    """Calls of these tools with these results, after their budget."""
    calls = [ToolCallRecord(name, text=text) for name, text in results]
    await apply_budget(calls, budget, store)
    return calls


async def test_results_within_budget_are_untouched_and_not_stored():
    shelf = Shelf()
    [result] = await budgeted([("terminal", "x" * 100_000)], ResultBudget(), shelf.store)
    assert result.text == "x" * 100_000
    assert result.stored_path is None
    assert shelf.kept == {}


async def test_a_long_result_is_shortened_and_its_whole_is_where_the_text_says():
    shelf = Shelf()
    whole = json.dumps({"output": "a" * 150_000, "exit_code": 0})
    [result] = await budgeted([("terminal", whole)], ResultBudget(), shelf.store)
    assert len(result.text) <= 100_000
    assert json.loads(result.text)["exit_code"] == 0
    assert result.stored_path is not None
    assert result.stored_path in result.text
    assert shelf.kept[result.stored_path] == whole


async def test_a_turn_over_budget_shortens_the_longest_results_only():
    shelf = Shelf()
    results = [("a", "s" * 1000), ("b", "x" * 90_000), ("c", "y" * 90_000), ("d", "z" * 90_000)]
    done = await budgeted(results, ResultBudget(), shelf.store)
    assert sum(len(result.text) for result in done) <= 200_000
    assert done[0].text == "s" * 1000
    assert [result.stored_path is None for result in done] == [True, False, False, False]


async def test_a_result_over_both_budgets_is_stored_once():
    shelf = Shelf()
    await budgeted([("a", "x" * 300_000), ("b", "y" * 300_000), ("c", "z" * 300_000)], ResultBudget(), shelf.store)
    assert len(shelf.kept) == 3


async def test_tools_can_have_limits_of_their_own():
    budget = ResultBudget(overrides={"read_file": None, "terminal": 1000})
    done = await budgeted([("read_file", "x" * 150_000), ("terminal", "y" * 1500)], budget, Shelf().store)
    assert len(done[0].text) == 150_000
    assert len(done[1].text) <= 1000


async def test_when_the_whole_cannot_be_stored_the_result_is_still_shortened():
    async def broken(text: str) -> str | None:
        raise SandboxLost("gone")

    [result] = await budgeted([("terminal", "x" * 150_000)], ResultBudget(), broken)
    assert len(result.text) <= 100_000
    assert result.stored_path is None


@given(
    sizes=st.lists(st.integers(0, 6000), max_size=8),
    per_result=st.integers(MIN_CHARS, 4000),
    per_turn=st.integers(4000, 20_000),
    as_json=st.booleans(),
)
async def test_every_result_and_the_turn_fit_and_json_stays_json(sizes, per_result, per_turn, as_json):
    texts = [json.dumps({"output": "x" * size}) if as_json else "x" * size for size in sizes]
    budget = ResultBudget(per_result, per_turn, preview_chars=MIN_CHARS)
    done = await budgeted([("t", text) for text in texts], budget, Shelf().store)
    assert all(len(result.text) <= per_result for result in done)
    assert sum(len(result.text) for result in done) <= max(per_turn, MIN_CHARS * len(done))
    for result, text in zip(done, texts, strict=True):
        if as_json:
            json.loads(result.text)
        assert result.stored_path is not None or result.text == text


def page_of(count: int, total: int = 5000) -> str:
    content = "\n".join(f'{n}|"line" {n}' for n in range(11, 11 + count))
    return json.dumps({"content": content, "total_lines": total, "truncated": False, "file_size": 9})


async def test_a_page_of_a_file_loses_whole_lines_at_its_end_and_says_where_to_read_on():
    shelf = Shelf()
    budget = ResultBudget(per_result_chars=10_000, per_turn_chars=12_000, preview_chars=1_000)
    results = await budgeted([("read_file", page_of(2000)), ("read_file", page_of(2000))], budget, shelf.store)
    assert sum(len(result.text) for result in results) <= 12_000
    for result in results:
        data = json.loads(result.text)
        lines = data["content"].split("\n")
        assert lines == [f'{n}|"line" {n}' for n in range(11, 11 + len(lines))]
        assert len(lines) > 100
        assert data["truncated"] is True
        assert data["next_offset"] == 11 + len(lines)
        assert str(data["next_offset"]) in data["hint"]
    assert shelf.kept == {}


async def test_an_error_of_read_file_and_a_line_that_does_not_fit_are_shortened_as_any_text():
    shelf = Shelf()
    wide = json.dumps({"content": "1|" + "x" * 2000, "total_lines": 1, "truncated": False})
    error = json.dumps({"error": "x" * 5000})
    results = await budgeted([("read_file", wide), ("read_file", error)], ResultBudget(500), shelf.store)
    assert all(len(result.text) <= 500 for result in results)
    assert len(shelf.kept) == 2
