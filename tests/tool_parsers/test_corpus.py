"""Other projects' own test cases: passed, or refused by name with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.parsers_corpus import complaints, records, refused, table
from support.parsers_formats_table import formats_table

FORMATS = Path(__file__).resolve().parents[2] / "tool_parsers" / "FORMATS.md"


@pytest.mark.parametrize("record", records(), ids=lambda record: f"{record['parser']}-{record['id']}")
def test_every_recorded_case_passes_or_is_refused_by_name(record: dict[str, Any]) -> None:
    found = complaints(record)
    if record["id"] in refused():
        assert found, "this case passes now: take it off the list of refused cases"
    else:
        assert not found


def test_refused_cases_are_few_and_their_reasons_published() -> None:
    published = FORMATS.read_text()
    assert all(f"`{reason}`" in published for reason in set(refused().values()))
    without_policy = [case for case in refused() if refused()[case] != "undeclared"]
    assert len(without_policy) / len(records()) < 0.07


def test_the_published_table_is_true() -> None:
    assert table() in FORMATS.read_text()


def test_the_published_list_of_formats_is_true() -> None:
    assert formats_table() in FORMATS.read_text()
