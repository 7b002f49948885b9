"""Toolsets resolve to known tools; draws are reproducible and follow their probabilities."""

import subprocess
import sys

import pytest

from agent_loop.tools.tool import ToolsetError
from agent_loop.tools.toolsets import CATALOG, DISTRIBUTIONS, TOOLSETS, check_distribution, draw, resolve


def test_terminal_and_file_are_exactly_six_tools():
    assert resolve(["terminal", "file"]) == ("terminal", "process", "read_file", "write_file", "patch", "search_files")


def test_order_and_repetition_of_names_do_not_matter():
    assert resolve(["file", "terminal", "read_file", "file"]) == resolve(["terminal", "file"])


def test_single_tools_can_be_chosen():
    assert resolve(["read_file", "todo"]) == ("read_file", "todo")


def test_an_unknown_name_is_an_error_that_lists_the_valid_ones():
    with pytest.raises(ToolsetError, match=r"'browser'; valid: code_execution, execute_code, file, .*web_search"):
        resolve(["terminal", "browser"])


def test_no_tools_is_an_error():
    with pytest.raises(ToolsetError, match="no tools"):
        resolve([])


def test_every_tool_of_the_catalog_is_in_exactly_one_toolset_and_the_other_way_round():
    listed = [tool for tools in TOOLSETS.values() for tool in tools]
    assert sorted(listed) == sorted(CATALOG)
    assert all(CATALOG[name].toolset == toolset for toolset, tools in TOOLSETS.items() for name in tools)


@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
def test_built_in_distributions_are_valid_and_draw_something(name):
    check_distribution(name, DISTRIBUTIONS[name])
    for seed in range(50):
        assert resolve(draw(name, seed))


def test_the_same_seed_draws_the_same_tools_in_another_process():
    here = [draw("balanced", seed) for seed in range(20)]
    code = "from agent_loop.tools.toolsets import draw; print([draw('balanced', s) for s in range(20)])"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == repr(here)
    assert len(set(here)) > 5


def test_probabilities_are_kept():
    drawn = [draw("terminal_tasks", f"group-{n}") for n in range(2000)]
    share = {toolset: sum(toolset in sets for sets in drawn) / len(drawn) for toolset in TOOLSETS}
    for toolset, probability in DISTRIBUTIONS["terminal_tasks"].items():
        assert share[toolset] == pytest.approx(probability, abs=0.05)


def test_when_nothing_is_drawn_the_most_likely_toolset_is_taken():
    odds = {"rare": {"web": 1e-12, "todo": 1e-9}}
    assert draw("rare", 1, distributions=odds) == ("todo",)


def test_what_is_not_available_is_never_drawn():
    assert all("web" not in draw("research", seed, available=("terminal", "todo")) for seed in range(100))
    with pytest.raises(ToolsetError, match="available"):
        draw("minimal", 1, available=("todo",))


@pytest.mark.parametrize(
    ("odds", "said"),
    [({"browser": 1.0}, "browser"), ({"web": 1.5}, "0..1"), ({"web": -0.1}, "0..1"), ({"web": 0.0}, "probability 0")],
)
def test_a_distribution_that_cannot_be_is_refused(odds, said):
    with pytest.raises(ToolsetError, match=said):
        draw("mine", 1, distributions={"mine": odds})


def test_an_unknown_distribution_lists_the_valid_ones():
    with pytest.raises(ToolsetError, match="terminal_only"):
        draw("nope", 1)
