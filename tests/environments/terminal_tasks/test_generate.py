from __future__ import annotations

import itertools
import string
from importlib.resources import files

import pytest

from environments.terminal_tasks import TerminalTasks, make_task, task_from_id
from environments.terminal_tasks.draw import vocabulary
from environments.terminal_tasks.generate import wordings
from environments.terminal_tasks.kinds import KINDS


def test_there_are_at_least_forty_kinds_over_all_levels() -> None:
    assert len(KINDS) >= 40
    assert {kind.level for kind in KINDS.values()} == {0, 1, 2, 3, 4}
    assert len({kind.category for kind in KINDS.values()}) >= 10


def test_every_kind_has_wordings_and_every_wording_a_kind() -> None:
    assert set(wordings()) == set(KINDS)
    for name, kind in KINDS.items():
        assert set(wordings()[name]) == ({"eval"} if kind.held_out else {"train", "eval"})


def test_training_and_evaluation_share_no_wording_and_no_name() -> None:
    for name, splits in wordings().items():
        assert not set(splits.get("train", ())) & set(splits["eval"]), name
    for words in vocabulary().values():
        assert not set(words.get("train", ())) & set(words.get("eval", ()))


def test_training_never_sees_a_held_out_kind_and_evaluation_sees_all() -> None:
    assert not any(kind.held_out for kind in TerminalTasks("train").kinds)
    assert len(TerminalTasks("eval").kinds) == len(KINDS)
    held_out = next(kind.name for kind in KINDS.values() if kind.held_out)
    with pytest.raises(ValueError, match="held out"):
        make_task(held_out, "train", 0)


def test_the_same_seed_gives_the_same_task_and_other_seeds_other_tasks() -> None:
    stream = TerminalTasks("train", seed=5)
    again = TerminalTasks("train", seed=5)
    first = [stream[i] for i in range(300)]
    assert first == [again[i] for i in range(300)]
    assert len({task.id for task in first}) == 300
    assert [task.id for task in itertools.islice(TerminalTasks("train", seed=6), 300)] != [task.id for task in first]


def test_a_task_can_be_made_again_from_its_id() -> None:
    for task in itertools.islice(TerminalTasks("eval", seed=9), 120):
        assert task_from_id(task.id) == task
    with pytest.raises(ValueError, match="terminal:SPLIT:KIND:SEED"):
        task_from_id("terminal:oops")


def test_each_lap_has_every_kind_once() -> None:
    stream = TerminalTasks("train", levels=(0,), seed=1)
    lap = [stream[i].kind for i in range(len(stream.kinds))]
    assert sorted(lap) == sorted(kind.name for kind in stream.kinds)


def test_level_0_is_one_short_command_and_one_short_sentence() -> None:
    for task in itertools.islice(TerminalTasks("train", levels=(0,)), 60):
        assert task.level == 0
        assert len(task.solution) == 1
        assert len(task.solution[0]) < 50
        assert len(task.prompt) < 90


@pytest.mark.parametrize("index", range(0, 400, 7))
def test_prompts_have_no_open_placeholder(index: int) -> None:
    prompt = TerminalTasks("eval", seed=2)[index].prompt
    assert prompt
    assert not [name for _, name, _, _ in string.Formatter().parse(prompt.replace("{}", "")) if name]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"split": "trian"}, "did you mean 'train'"),
        ({"categories": ["gti"]}, "did you mean 'git'"),
        ({"kinds": ["copy_fil"]}, "did you mean 'copy_file'"),
        ({"levels": [9]}, "no train task kind"),
    ],
)
def test_a_selection_that_cannot_be_meant_is_refused(arguments: dict, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        TerminalTasks(**arguments)


def test_the_example_of_the_readme_runs() -> None:
    page = (files("environments.terminal_tasks") / "README.md").read_text("utf-8")
    example = page.split("```python\n")[1].split("```")[0]
    space: dict[str, object] = {}
    exec(example, space)
    assert space["task"] == TerminalTasks("train", levels=[0, 1], seed=7)[12]
    assert f"{len(KINDS)} kinds in {len({kind.category for kind in KINDS.values()})} categories" in page
    assert f"{sum(kind.held_out for kind in KINDS.values())} kinds exist in `eval` only" in page
