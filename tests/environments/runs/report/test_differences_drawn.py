"""A fault put into a rollout of the real model: `verify --against` finds its place, and the page draws it there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from environments.apps.cli import main as cli
from support.browser import opened
from support.tokens_cpu import chatty_rollouts, one_slot, require_cpu_model

DRAWN = """[...document.querySelectorAll('.segment')].flatMap((segment, number) =>
  [...segment.querySelectorAll('.differs')].map((token) => [number, Number(token.dataset.at)]))"""


@pytest.mark.ci
@pytest.mark.timeout(600)
async def test_what_the_real_model_contradicts_is_drawn_at_its_place(
    tmp_path: Path, browser: str, capsys: pytest.CaptureFixture[str]
) -> None:
    require_cpu_model()
    run, differences = tmp_path / "rollouts.jsonl", tmp_path / "differences.json"
    verify = ["verify", str(run), "--positions", "24", "--tolerance", "0.02", "--differences", str(differences)]
    async with one_slot(f16=True) as model:
        (_, sound), (_, spoiled) = await chatty_rollouts(model, 2)
        call = spoiled.sampled_calls[1]
        positions = [len(call.prompt_ids) + n for n in range(len(call.logprobs))]
        for n, position in enumerate(positions):
            call.logprobs[n] -= 1.5
            spoiled.segments[call.segment].logprobs[position] -= 1.5
        run.write_bytes(sound.to_json() + b"\n" + spoiled.to_json() + b"\n")
        assert await asyncio.to_thread(cli.main, [*verify, "--against", model.url]) == 1
    assert spoiled.rollout_id in capsys.readouterr().out
    assert cli.main(["view", str(run), "--differences", str(differences)]) == 0
    page = (tmp_path / "report.html").as_uri()
    async with opened(browser, f"{page}#r={spoiled.rollout_id}&v=tokens") as tab:
        await tab.until("document.querySelector('.differs')")
        drawn = await tab.js(DRAWN)
        assert drawn
        assert {tuple(place) for place in drawn} <= {(call.segment, position) for position in positions}
        await tab.click(".differs")
        apart = re.search(r"now, ([0-9.]+) apart: beyond the tolerance", await tab.text(".token-facts"))
        assert apart is not None
        assert float(apart[1]) == pytest.approx(1.5, abs=0.02)
        await tab.picture(tmp_path / "differences-of-a-real-model.png")
    async with opened(browser, f"{page}#r={sound.rollout_id}&v=tokens") as tab:
        await tab.until("document.querySelector('.confirmed')")
        assert await tab.js(DRAWN) == []
