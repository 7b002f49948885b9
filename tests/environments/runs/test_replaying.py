"""`replay`: a recorded rollout goes the same way again without model and slots, and a change shows as a divergence."""

from __future__ import annotations

import gzip
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from agent_loop.local_models.standin import PolicyRequest
from agent_loop.local_models.standin.policies import call
from agent_loop.records.record import AgentResult
from agent_loop.records.tape import Diverged, Replay, Tape, playing, random_name
from environments.base import HermesAgentEnvConfig, ToolContext
from environments.errors import UsageError
from environments.rollouts.cassettes import Cassette, Cassettes
from environments.runs.batch import process_run
from environments.runs.replaying import Replayed, find_cassette, replay
from sandbox_pool import SlotPool
from support.env_tasks import NumberEnv, right, standin_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCRIPT = """
from hermes_tools import terminal, write_file
for number in range(3):
    print(terminal(f"echo nested {number}")["output"])
write_file("notes.txt", "from a script")
"""
STEPS = (
    ("execute_code", {"code": SCRIPT}),
    ("terminal", {"command": "cat notes.txt; date +%s%N; echo $RANDOM"}),
    ("terminal", {"command": "sleep 0.2; echo late", "background": True}),
    ("process", {"action": "list"}),
    ("patch", {"path": "notes.txt", "old_string": "script", "new_string": "patch"}),
    ("read_file", {"path": "notes.txt"}),
    ("terminal", {"command": "head -c 300 /dev/urandom > noise; cat noise; echo 0 > answer.txt"}),
)


def busy(request: PolicyRequest) -> str:
    """One of each kind of call, then the end."""
    done = request.results
    return call(*STEPS[done]) if done < len(STEPS) else "Done."


class WatchedEnv(NumberEnv):
    """Reads the agent's workspace in every way that there is."""

    extra = ""

    async def prepare(self, item: dict[str, Any], ctx: Any) -> None:
        await ctx.write_file("given.txt", "given")

    async def compute_reward(self, item: dict[str, Any], result: AgentResult, ctx: ToolContext) -> float:
        kept = (await ctx.agent_state.read_file("answer.txt")).decode().strip()
        assert len(await ctx.agent_state.read_file("noise")) == 300
        answer = await ctx.terminal(f"cat answer.txt{self.extra}; rm -f {random_name(4)}")
        return float(kept == answer["output"].strip() == str(item["number"]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SlotPool]:
    async with SlotPool.from_config(HermesAgentEnvConfig().pool) as made:
        yield made


SETTINGS: dict[str, Any] = {
    "group_size": 1,
    "total_steps": 1,
    "cassettes": True,
    "max_agent_turns": 12,
    "max_token_length": 32_000,
    "enabled_toolsets": ["terminal", "file", "code_execution"],
    "store_end_state": True,
}


async def record(env: NumberEnv, out: Path) -> Path:
    assert await process_run(env, out) == 0
    (path,) = (out / "cassettes").iterdir()
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cassette(pool: SlotPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    async with standin_model(busy) as (model, _):
        return await record(WatchedEnv(pool, model, **SETTINGS), tmp_path_factory.mktemp("run"))


async def played(path: Path, kind: type[NumberEnv] = WatchedEnv, **changes: Any) -> Replayed:
    return await replay(path, environment=kind(**SETTINGS | changes))


async def test_everything_a_rollout_can_do_is_the_same_again_without_model_and_slots(cassette: Path) -> None:
    recorded = Cassette.read(cassette).record
    called = [call["name"] for call in recorded.tool_calls if call["parent"] is None]
    assert called == [name for name, _ in STEPS]
    assert recorded.outcome == "finished"
    assert recorded.verifier_score == 1.0
    again = await played(cassette)
    assert again.divergence is None
    assert again.model_answers == len(STEPS) + 1
    assert again.record.messages == recorded.messages  # with `date` and $RANDOM in them
    assert again.record.segments == recorded.segments
    assert recorded.segments
    assert again.record.end_state == recorded.end_state
    assert recorded.end_state


async def test_another_command_of_the_verifier_is_shown_with_what_was_recorded(cassette: Path) -> None:
    class OtherEnv(WatchedEnv):
        extra = " other.txt"

    again = await played(cassette, OtherEnv)
    assert again.divergence is not None
    assert "cat answer.txt;" in again.divergence.recorded
    assert "cat answer.txt other.txt" in again.divergence.now
    assert str(again).startswith(f"{again.record.rollout_id} diverges at request ")


async def test_another_prompt_is_shown_by_the_token_where_it_begins_to_differ(cassette: Path) -> None:
    class OtherEnv(WatchedEnv):
        def format_prompt(self, item: dict[str, Any]) -> str:
            return f"Write {item['number']} into answer.txt, please"

    again = await played(cassette, OtherEnv)
    assert again.divergence is not None
    assert again.divergence.now.startswith('model {"ids (')
    assert not again.record.turns


async def test_a_reward_that_judges_otherwise_is_a_difference_of_the_record(cassette: Path) -> None:
    class OtherEnv(WatchedEnv):
        async def compute_reward(self, item: dict[str, Any], result: AgentResult, ctx: ToolContext) -> float:
            return await super().compute_reward(item, result, ctx) / 2

    again = await played(cassette, OtherEnv)
    assert again.divergence is not None
    assert again.divergence.place == "the record.score"
    assert (again.divergence.recorded, again.divergence.now) == ("1.0", "0.5")


async def test_a_verifier_that_asks_less_is_a_difference(cassette: Path) -> None:
    class OtherEnv(WatchedEnv):
        async def compute_reward(self, item: dict[str, Any], result: AgentResult, ctx: ToolContext) -> float:
            return 1.0

    again = await played(cassette, OtherEnv)
    assert again.divergence is not None
    assert again.divergence.now == "the end"


async def test_faults_of_the_model_are_on_the_cassette_too(pool: SlotPool, tmp_path: Path) -> None:
    asked = 0

    def flaky(request: PolicyRequest) -> str:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise RuntimeError("a server that fails once")
        return right(request)

    async with standin_model(flaky) as (model, _):
        path = await record(NumberEnv(pool, model, **SETTINGS), tmp_path)
    recorded = Cassette.read(path).record
    assert [turn["retries"] for turn in recorded.turns] == [0, 1]
    assert (await played(path, NumberEnv)).divergence is None


async def test_an_item_that_is_no_json_is_asked_for_again(pool: SlotPool, tmp_path: Path) -> None:
    class ObjectEnv(NumberEnv):
        def item_to_json(self, item: Any) -> Any:
            return object()

    async with standin_model(right) as (model, _):
        path = await record(ObjectEnv(pool, model, **SETTINGS), tmp_path)
    assert Cassette.read(path).about["item"] is None
    assert (await played(path, ObjectEnv)).divergence is None


async def test_a_run_without_cassettes_and_other_files_are_refused_in_one_sentence(
    cassette: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"has no cassettes: record some with --env\.cassettes true"):
        find_cassette(tmp_path)
    with pytest.raises(UsageError, match=r"there is no run .*nowhere"):
        find_cassette(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"no cassette of the rollout 'x'; there are numbers-0-000000/0"):
        find_cassette(cassette.parents[1], "x")
    with pytest.raises(UsageError, match=r"which rollout of .* such as numbers-0-000000/0"):
        find_cassette(cassette.parents[1])
    for content in (b"", b"no gzip", gzip.compress(b'{"cassette": 1}'), Cassette.read(cassette).data()[:-20]):
        (tmp_path / "damaged").write_bytes(content)
        with pytest.raises(UsageError, match="damaged is not a cassette"):
            Cassette.read(tmp_path / "damaged")
    whole = Cassette.read(cassette)
    (tmp_path / "later").write_bytes(gzip.compress(orjson.dumps({"cassette": 2}) + b"\n{}"))
    with pytest.raises(UsageError, match="is a cassette of version 2, not 1"):
        Cassette.read(tmp_path / "later")
    (tmp_path / "same").write_bytes(replace(whole).data())
    assert Cassette.read(tmp_path / "same") == whole


async def test_the_file_of_a_rollout_is_found_by_its_id(cassette: Path) -> None:
    run = cassette.parents[1]
    assert find_cassette(run, "numbers-0-000000/0") == cassette == Cassettes.file(run, "numbers-0-000000/0")
    assert find_cassette(cassette) == cassette


async def test_answers_come_only_after_everything_before_them_on_the_tape() -> None:
    tape = Tape()
    first, second = tape.sent("slot", {"op": "a"}), tape.sent("slot", {"op": "b"})
    tape.came(second, "reply", value=2)
    tape.came(first, "reply", value=1)
    play = Replay(tape.entries, patience_s=0.05)
    number = play.sent("slot", {"op": "b"})  # made first this time: its answer waits for the other request
    with pytest.raises(Diverged):
        await play.arrived(number)
    assert play.divergence is not None
    assert '"a"' in play.divergence.recorded
    play = Replay(tape.entries)
    numbers = play.sent("slot", {"op": "b"}), play.sent("slot", {"op": "a"})
    assert [(await play.arrived(number))["value"] for number in numbers] == [2, 1]


async def test_random_names_are_the_same_again_and_no_more_than_were_drawn() -> None:
    tape = Tape()
    token = playing.set(tape)
    drawn = [random_name(4), random_name(4)]
    playing.set(play := Replay(tape.entries))
    assert [random_name(4), random_name(4)] == drawn
    with pytest.raises(Diverged, match="one more value of kind random"):
        random_name(4)
    assert play.divergence is not None
    playing.reset(token)


@pytest.mark.filterwarnings("ignore:.*is marked with '@pytest.mark.asyncio'")
def test_the_command_says_equal_or_where_it_diverges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = ["terminal_tasks", "--out", str(run)]
    settings = ["--env.total_steps", "1", "--env.group_size", "1", "--env.cassettes", "true"]
    from environments.apps.cli.main import main

    assert main(["process", *words, *settings]) == 0
    capsys.readouterr()
    (path,) = (run / "cassettes").iterdir()
    rollout = Cassette.read(path).record.rollout_id
    assert main(["replay", str(run), rollout]) == 0
    assert capsys.readouterr().out.rstrip().endswith(": equal")
    assert main(["replay", str(path), "--env.system_prompt", "Be quick."]) == 1
    assert "\n  recorded: model " in capsys.readouterr().out
    assert main(["replay", str(path), rollout]) == 2


async def test_a_divergence_is_told_without_a_traceback() -> None:
    from environments.apps.cli.replay import _is_news

    def record(error: Exception) -> logging.LogRecord:
        return logging.LogRecord("x", logging.ERROR, "x.py", 1, "failed", (), (type(error), error, None))

    assert not _is_news(record(Diverged("request 1 of 2", "a", "b")))
    assert _is_news(record(ValueError("of the environment")))
