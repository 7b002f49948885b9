"""A newcomer finds the place: few modules in a folder, names used once, few fragments, short ways. See `layout.py`."""

from __future__ import annotations

import pytest

from house import layout


def test_no_folder_holds_more_modules_than_a_glance_takes_in():
    """The commands are one module per verb, and found by its name."""
    counts = layout.modules_per_folder()
    del counts["environments/apps/cli"]
    assert {folder: count for folder, count in counts.items() if count > 16} == {}


def test_a_module_name_is_used_once_in_a_package():
    assert layout.names_used_twice() == []


def test_few_modules_serve_a_single_other_one():
    found = layout.single_importers()
    assert len(found) <= 0.18 * len(layout.modules()), "\n".join(found)


def test_no_module_needs_itself():
    assert layout.cycles() == []


def test_nothing_private_is_imported_from_another_package():
    assert layout.private_imports() == []


async def test_one_terminal_call_passes_few_files():
    files = await layout.every_time(layout.way_of_a_call, few=25)
    assert "agent_loop/loop.py" in files
    assert len(files) <= 25, "\n".join(files)


@pytest.mark.timeout(240)
@pytest.mark.ci
async def test_one_group_passes_few_files():
    files = await layout.every_time(layout.way_of_a_group, few=62)
    assert {"environments/base.py", "environments/atropos/outbox.py"} <= set(files)
    # Two of them are the cassette's, through which every answer of model and slot passes. Three are of the line to a
    # slot's shell: the server's process did that work before, and only files of the client's count here.
    assert len(files) <= 62, "\n".join(files)


def test_an_adapter_to_a_trainer_is_short():
    """At most 150 lines for each module, whole; what adapters share is a module of its own."""
    folder = layout.ROOT / "environments" / "trainers"
    lines = {str(path.relative_to(folder)): len(path.read_text().splitlines()) for path in folder.rglob("*.py")}
    assert len(lines) > 15
    assert {name: count for name, count in lines.items() if count > 150} == {}
