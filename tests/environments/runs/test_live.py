"""A run while it goes on: what the files tell, what the server gives to whom, and what the page and `top` show."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from agent_loop.records.record import RolloutRecord
from environments.apps.cli import main as cli
from environments.runs.batch import process_run
from environments.runs.live import LiveRun, LiveServer
from environments.runs.status import StatusFile, add_figures
from support.axe import faults
from support.browser import opened
from support.env_pool import DirectoryPool
from support.env_tasks import NumberEnv, right, standin_model
from support.learn_entries import evaluation, step
from support.pool_wait import eventually
from support.records import make_record
from support.token_records import tokenized


def add(folder: Path, *records: RolloutRecord) -> None:
    with (folder / "rollouts.jsonl").open("ab") as file:
        file.write(b"".join(record.to_json() + b"\n" for record in records))


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[str]:
    async with LiveServer(LiveRun(folder)).serving("127.0.0.1", 0) as address:
        yield address


def test_what_is_appended_is_found_once_and_a_torn_line_waits(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    assert not run.look()
    add(tmp_path, make_record(sample=0, verifier_score=1.0))
    line = make_record(sample=1, verifier_score=0.0).to_json()
    with (tmp_path / "rollouts.jsonl").open("ab") as file:
        file.write(line[:200])
        file.flush()
        assert run.look()
        assert [entry["id"] for entry in run.entries] == ["smollm2-135m-0-0"]
        file.write(line[200:] + b"\n")
    run.look()
    assert [entry["advantage"] for entry in run.entries] == [1.0, -1.0]
    assert run.detail(1)["id"] == "smollm2-135m-0-1"
    assert not run.look()


def test_a_run_that_starts_over_is_another_one(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    add(tmp_path, make_record(sample=0), make_record(sample=1))
    run.look()
    (tmp_path / "rollouts.jsonl").write_bytes(make_record(item=5).to_json() + b"\n")
    run.look()
    assert (run.runs, [entry["id"] for entry in run.entries]) == (2, ["smollm2-135m-5-0"])


async def test_process_tells_what_it_does_and_that_it_ended(tmp_path: Path) -> None:
    pool = DirectoryPool(slots=4)
    try:
        async with standin_model(right) as (model, _):
            await process_run(NumberEnv(pool, model, total_steps=2), tmp_path)
    finally:
        pool.close()
    run = LiveRun(tmp_path)
    run.look()
    facts = run.facts()
    assert facts["run"].startswith("process, process ")
    assert facts["run"].endswith(": ended")
    assert facts["groups"] == "2 of 2"
    assert facts["rollouts"] == "8"


async def test_a_run_tells_that_it_runs_from_its_start_on(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    async with StatusFile(tmp_path / "rollouts.jsonl", "process", dict):
        await eventually(run.look)
        assert run.facts()["run"].endswith(": running")
    run.look()
    assert run.facts()["run"].endswith(": ended")


async def test_facts_of_serve_and_of_learn_are_told(tmp_path: Path) -> None:
    told = {"step": 3, "queue": 5, "sent": 6, "unsent": 1, "running": 2, "rejected": {"no_signal": 4}}
    slots = dict.fromkeys(("slots_leased", "slots_free", "slots_resetting", "slots_quarantined"), 1)
    learning = {"doing": "evaluating after step 2", "evaluated": (12, 33), "weights": "2", "sampled_tokens": 4096}
    learning |= dict.fromkeys(slots, 0) | {"tokens_per_s": 94.6, "waiting_for_slots": 1, "slots_leased": 8}
    async with StatusFile(tmp_path / "rollouts.jsonl", "serve", lambda: told | slots | {"waiting_for_slots": 7}):
        pass
    async with StatusFile(tmp_path / "rollouts.jsonl", "learn", lambda: learning):
        pass
    lines = (evaluation(0, 0.1), step(1, loss=0.25), step(2, loss=0.125))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = LiveRun(tmp_path)
    run.look()
    facts = run.facts()
    assert facts["queue of run-api"] == "5 groups, 1 not sent yet"
    assert facts["groups sent"] == "6"
    assert facts["groups not sent"] == "4 no_signal"
    assert facts["run"].startswith("learn, process ")
    assert facts["now"] == "evaluating after step 2: 12 of 33 tasks"
    assert facts["model"] == "weights 2, 4,096 tokens sampled, 95 a second while it samples"
    assert facts["slots"] == "9 leased, 1 free, 1 resetting, 1 broken"
    assert facts["waiting for slots"] == "8"
    assert facts["step"] == "2, loss 0.1250"
    assert run.curves()["loss"] == [(1, 0.25), (2, 0.125)]
    assert run.curves()["held-out success"] == [(0, 0.1)]


def test_what_serve_logs_at_each_step_are_its_curves(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    for number, score in enumerate((0.25, 0.5), 1):
        add_figures(tmp_path / "rollouts.jsonl", number, {"rollouts/verifier_score": score, "rollouts/score": None})
        assert run.look()
    add_figures(tmp_path / "rollouts.jsonl", 2, {"eval/mean_score": 0.75})
    run.look()
    assert run.curves() == {"mean score": [(1, 0.25), (2, 0.5)], "evaluation": [(2, 0.75)]}
    assert run.along == "step"
    assert not run.look()


async def test_runs_that_share_a_folder_have_files_of_their_own(tmp_path: Path) -> None:
    for name, number in (("left", 3), ("right", 7), ("rollouts", 9)):
        path = tmp_path / f"{name}.jsonl"
        add_figures(path, number, {"rollouts/verifier_score": number / 10})
        async with StatusFile(path, "serve", lambda number=number: {"step": number}):
            pass
    for name, number in (("left.jsonl", 3), ("right.jsonl", 7), ("", 9)):
        run = LiveRun(tmp_path / name)
        run.look()
        assert run.facts()["step of the trainer"] == str(number)
        assert run.curves() == {"mean score": [(number, number / 10)]}


async def test_nobody_without_the_token_is_answered(tmp_path: Path) -> None:
    add(tmp_path, make_record())
    async with served(tmp_path) as address, aiohttp.ClientSession() as http:
        root, token, _ = address.rsplit("/", 2)
        assert root.startswith("http://127.0.0.1:")
        for path in ("/", "/x/", "/x/events", "/x/rollout/0", f"/{token}x/", f"/{token[:-1]}/", f"/{token}"):
            async with http.get(root + path, allow_redirects=False) as answer:
                assert answer.status == 404, path
        async with http.get(address) as answer:
            assert answer.status == 200
            assert "connect-src 'self'" in await answer.text()
        async with http.get(f"{address}rollout/1") as answer:
            assert answer.status == 404


async def test_an_event_tells_what_is_new_and_a_lost_connection_goes_on_where_it_was(tmp_path: Path) -> None:
    add(tmp_path, make_record(sample=0))
    async with served(tmp_path) as address, aiohttp.ClientSession() as http:

        async def next_event(**headers: str) -> tuple[int, list[str]]:
            async with http.get(f"{address}events?from=1", headers=headers) as answer:
                lines = [(await answer.content.readline()).decode().strip() for _ in range(3)]
            news = json.loads(lines[2].removeprefix("data: "))
            return int(lines[1].removeprefix("id: ")), [entry["id"] for entry in news["rollouts"]]

        assert await next_event() == (1, [])
        add(tmp_path, make_record(sample=1))
        async with http.get(f"{address}events?from=1") as answer:
            seen = b""
            while b"smollm2-135m-0-1" not in seen:
                seen += await answer.content.readany()
        assert await next_event() == (2, ["smollm2-135m-0-1"])
        assert await next_event(**{"Last-Event-ID": "2"}) == (2, [])


@pytest.mark.parametrize("width", [1400, 390])
async def test_the_page_shows_rollouts_as_they_come(width: int, tmp_path: Path, browser: str) -> None:
    add(tmp_path, tokenized(make_record(sample=0, verifier_score=0.0)))
    async with served(tmp_path) as address, opened(browser, address, width=width) as tab:
        await tab.until("document.body.dataset.ready && document.querySelector('#live h2').innerText === 'Live'")
        assert await tab.text("#count") == "1 rollout"
        add(tmp_path, tokenized(make_record(sample=1, verifier_score=1.0)))
        metrics = "".join(json.dumps(step(n, loss=1 / n)) + "\n" for n in (1, 2))
        (tmp_path / "metrics.jsonl").write_text(metrics)
        await tab.until("document.getElementById('count').innerText === '2 rollouts'")
        await tab.until("document.querySelector('#live').innerText.includes('loss 0.5000')")
        assert await tab.js("document.querySelectorAll('#live .curve').length") == 2  # reward and loss
        assert "adv −1.00" in (await tab.texts(".row"))[0]  # of the group that is whole only now
        await tab.click(".row", "adv +1.00")
        await tab.click("summary", "Tokens of turn 1")
        assert "Step⏎" not in await tab.text(".token-block:last-child .tokens")
        assert (await tab.text(".turn-tokens[open] .token-block:last-child .tokens")).startswith("Step 1: look")
        await tab.picture(tmp_path / f"live-{width}.png")
        assert await tab.js("document.documentElement.scrollWidth") <= width
        assert await faults(tab) == []
        assert all(request.startswith(address) for request in tab.requests)


async def test_news_disturb_neither_filters_nor_search_nor_focus(tmp_path: Path, browser: str) -> None:
    add(tmp_path, tokenized(make_record(sample=0, verifier_score=0.0)))
    async with served(tmp_path) as address, opened(browser, f"{address}#score=zero&q=agent") as tab:
        await tab.until("document.getElementById('count').innerText === '1 rollout'")
        await tab.js("document.querySelector('.row').focus()")
        add(tmp_path, *(tokenized(make_record(sample=n, verifier_score=float(n > 1))) for n in (1, 2, 3)))
        await tab.until("document.getElementById('count').innerText === '2 of 4'")
        assert (await tab.text(".tile")).split("\n")[1] == "0.000"  # of those that the filters leave
        assert await tab.js("document.activeElement.dataset.id") == "smollm2-135m-0-0"


async def test_the_page_of_a_run_that_died_says_so_and_one_of_a_broken_line_goes_on(
    tmp_path: Path, browser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("environments.runs.live.STALE_S", 1.0)
    add(tmp_path, make_record(sample=0))
    told = {"verb": "serve", "pid": 7, "at": time.time(), "ended": False, "facts": {}}
    (tmp_path / "status.json").write_text(json.dumps(told))
    async with served(tmp_path) as address, opened(browser, address) as tab:
        await tab.until("document.querySelector('#live').innerText.includes('no word for')")
        with (tmp_path / "rollouts.jsonl").open("ab") as file:
            file.write(b'{"version": 1, "nonsense": 2}\n')
        await tab.until("document.querySelector('#live').innerText.includes('rollouts.jsonl: byte')")
        add(tmp_path, make_record(sample=1))
        await tab.until("document.getElementById('count').innerText === '2 rollouts'")


def test_view_live_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    add(tmp_path, make_record())
    words = [sys.executable, "-m", "environments.apps.cli.main", "view", str(tmp_path), "--live"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0


def test_top_prints_the_run_in_eighty_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = make_record(sample=1, outcome="deadline", rollout_id="a-very-long-name-of-a-rollout-" * 3)
    add(tmp_path, make_record(sample=0), long)
    assert cli.main(["top", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    for words in ("mean score", "1.000", "lost", "1 (1 deadline)", "smollm2-135m-0-0", "finished 1, deadline 1"):
        assert words in said


def test_nothing_that_a_task_says_steers_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    record = make_record(outcome="odd [red] \x1b[2J")
    record.messages[1]["content"] = "clear \x1b[2J\x1b]0;title\x07 \u202etxet"
    add(tmp_path, record)
    assert cli.main(["top", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "clear ␛[2J␛]0;title␇ ‹U+202E›txet" in said
    assert "odd [red] ␛[2J" in said
    assert all(sign.isprintable() or sign == "\n" for sign in said)


def test_a_long_question_leaves_the_figures_their_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    record = make_record()
    record.messages[1]["content"] = "Delete all files that end in .tmp, but not those below. " * 9
    add(tmp_path, record)
    assert cli.main(["top", str(tmp_path)]) == 0
    head, row = capsys.readouterr().out.splitlines()[-2:]
    assert head.split() == ["newest", "rollouts", "outcome", "score", "turns", "time", "asked"]
    assert row.split()[:3] == [record.rollout_id, "finished", "1.000"]
    assert "Delete all files" in row
    assert len(row) <= 120


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
async def test_top_fills_a_real_terminal_and_follows_the_run_and_its_size(tmp_path: Path) -> None:
    learning = {
        "doing": "sampling for step 9",
        "evaluated": None,
        "weights": "8",
        "sampled_tokens": 9,
        "tokens_per_s": 1,
    }
    told = {"step": 8, "queue": 5, "sent": 6, "unsent": 1, "running": 2, "rejected": {"no_signal": 4}}
    slots = dict.fromkeys(
        ("slots_leased", "slots_free", "slots_resetting", "slots_quarantined", "waiting_for_slots"), 1
    )
    rollouts = tmp_path / "rollouts.jsonl"
    async with StatusFile(rollouts, "serve", lambda: told | slots), StatusFile(rollouts, "learn", lambda: learning):
        pass
    lines = [evaluation(0, 0.1), *(step(number, loss=0.5 / number) for number in range(1, 9))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    add(tmp_path, *(make_record(item=number) for number in range(40)))
    own = ["tmux", "-S", str(tmp_path / "tmux"), "-f", "/dev/null"]

    def tmux(*words: str) -> str:
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "TMUX")}
        return subprocess.run([*own, *words], env=environ, capture_output=True, text=True, check=True).stdout

    def pane() -> list[str]:
        return tmux("capture-pane", "-p").rstrip("\n").split("\n")

    async def eventually_shown(*words: str) -> list[str]:
        return await eventually(lambda: (found := pane()) and all(w in "\n".join(found) for w in words) and found)

    tmux(
        "new-session",
        "-d",
        "-x",
        "80",
        "-y",
        "24",
        sys.executable,
        "-m",
        "environments.apps.cli.main",
        "top",
        str(tmp_path),
    )
    try:
        shown = await eventually_shown("newest rollouts")
        assert len(shown) <= 24
        everything = "\n".join(shown)
        for words in (
            "sampling for step 9",
            "queue of run-api",
            "slots",
            "held-out success",
            "loss",
            "smollm2-135m-39-0",
        ):
            assert words in everything
        assert "…" not in "\n".join(shown[1:])
        add(tmp_path, make_record(item=77))
        await eventually_shown("smollm2-135m-77-0", "41")
        tmux("resize-window", "-x", "200", "-y", "50")
        wide = await eventually_shown("asked", "smollm2-135m-77-0", "smollm2-135m-20-0")
        assert any("held-out success" in line and "learn, process" in line for line in wide)  # side by side
    finally:
        tmux("kill-server")
