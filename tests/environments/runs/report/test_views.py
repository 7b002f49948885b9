"""What the token view, the group view and the page of two runs show in a real browser, against the records."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.model.tokens.ledger import MASKED
from agent_loop.records.record import RolloutRecord
from agent_loop.records.verify import Report
from environments.runs.comparison import compare
from environments.runs.report import build_report
from environments.runs.report.html_page import build_comparison
from support.axe import faults
from support.browser import Page, opened
from support.records import make_record
from support.token_records import tokenized

WIDTHS = pytest.mark.parametrize("width", [1400, 390])
READ_TOKENS = """[...document.querySelectorAll('.segment')].map((segment) => [...segment.querySelectorAll('.t')].map(
  (t) => [t.innerText.replaceAll('⏎', '').trim(), t.className]))"""


def group_of_three() -> list[RolloutRecord]:
    """One group: solved; solved and then destroyed; and one whose context was truncated and whose call was repaired."""
    good, spoiled, cut = (make_record(sample=n, turns=3, verifier_score=float(n == 0)) for n in range(3))
    spoiled.messages[4]["content"] = "I remove it again: é ☃."
    cut.messages[2]["content"] = "Another way."
    cut.tool_calls[0]["repairs"] = ["trailing_comma"]
    cut.truncations = [{"turn": 3, "dropped": 2}]
    spoiled.turn_scores = [0.0, 1.0, 0.0]
    for record, text in ((good, "a\nb\n"), (spoiled, "a\nx\n"), (cut, "a\nb\n")):
        record.end_state = {"notes.txt": "same\n", "sorted.txt": text}
    return [tokenized(good), tokenized(spoiled), tokenized(cut, restart_before=3)]


def write(tmp_path: Path, records: list[RolloutRecord], **more: object) -> Path:
    page = tmp_path / "report.html"
    page.write_text(build_report(records, title="x", **more), encoding="utf-8")  # type: ignore[arg-type]
    return page


def spelled(record: RolloutRecord, token: int) -> str:
    piece = record.pieces[str(token)]
    return piece if isinstance(piece, str) else "".join(f"\\x{byte:02X}" for byte in piece)


def test_the_records_of_these_tests_are_exact() -> None:
    report = Report()
    for line, record in enumerate(group_of_three(), 1):
        report.add(record, line)
    assert [v for v in report.violations if v.check != "metrics"] == []


@WIDTHS
async def test_every_token_is_shown_with_its_kind_and_its_facts(width: int, tmp_path: Path, browser: str) -> None:
    records = group_of_three()
    wanted = records[2].sampled_calls[1]
    position, third = len(wanted.prompt_ids), records[2]
    segments = [list(segment.tokens) for segment in third.segments]
    masks = [list(segment.masks) for segment in third.segments]
    texts = [[spelled(third, token).replace("\n", "").strip() for token in tokens] for tokens in segments]
    differences = {third.rollout_id: [[0, position, wanted.logprobs[0], wanted.logprobs[0] - 2.0, True]]}
    page = write(tmp_path, records, differences=differences)
    async with opened(browser, f"{page.as_uri()}#r=smollm2-135m-0-2&by=mask", width=width) as tab:
        await tab.click("button", "All tokens")
        await tab.until("document.querySelectorAll('.segment').length === 2")
        shown = await tab.js(READ_TOKENS)
        assert [[text for text, _ in segment] for segment in shown] == texts
        for segment, own in zip(shown, masks, strict=True):
            assert [" t-trained" in name for _, name in segment] == [mask != MASKED for mask in own]
        assert "Segment 2 of 2" in (await tab.texts(".segment h3"))[1]
        assert "Context truncated before turn 3: dropped 2" in await tab.text("#detail .marker")
        differing = await tab.js("[...document.querySelectorAll('.differs')].map((t) => Number(t.dataset.at))")
        assert differing == [position]
        await tab.click(".differs")
        facts = await tab.text(".token-facts")
        logprob = wanted.logprobs[0]
        for words in (
            f"id {wanted.sampled_ids[0]} ",
            f"logprob {logprob:.4f}",
            "mask: trained",
            "advantage -0.707",
            "weights 7",
            f"entropy at least {wanted.entropies[0]:.3f}",
            f"the model says {logprob - 2:.4f} now, 2.0000 apart: beyond the tolerance",
        ):
            assert words in facts
        await tab.picture(tmp_path / f"tokens-{width}.png")
        assert await tab.js("document.documentElement.scrollWidth") <= width
        assert await faults(tab) == []


async def test_a_turn_opens_into_its_tokens_and_tells_template_from_text(tmp_path: Path, browser: str) -> None:
    records = group_of_three()
    sampled, repaired = records[2].sampled_calls[0], records[2]
    texts = [spelled(repaired, token).replace("\n", "").strip() for token in sampled.sampled_ids]
    page = write(tmp_path, records)
    async with opened(browser, f"{page.as_uri()}#r=smollm2-135m-0-2") as tab:
        await tab.click("summary", "Tokens of turn 1")
        block = ".turn-tokens[open] .token-block"
        await tab.until(f"document.querySelector('{block}')")
        own = f"{block}:last-child .t"
        assert [text.replace("⏎", "").strip() for text in await tab.texts(own)] == texts
        assert "repaired before it ran: trailing_comma" in await tab.text(".turn-tokens .marker")
        await tab.click(".turn-tokens .before summary")
        glue = await tab.until("[...document.querySelectorAll('.before .k-glue')].map((t) => t.innerText).join('')")
        given = await tab.js("[...document.querySelectorAll('.before .k-given')].map((t) => t.innerText).join('')")
        assert glue.replace("⏎\n", "\n").startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\n")
        assert given.startswith("You are a shell agent. Use the terminal tool.Sort the lines")
        colours = {}
        for by in ("logprob", "advantage", "weights"):
            await tab.js(
                "(() => { const s = document.querySelector('.turn-tokens .colour'); "
                f"s.value = '{by}'; s.dispatchEvent(new Event('change')); }})()"
            )
            colours[by] = await tab.js(f"[...document.querySelectorAll('{own}')].map((t) => t.className)")
        assert all("t-p" in name for name in colours["logprob"])
        assert all("t-down" in name for name in colours["advantage"])
        assert ["t-w0" in name for name in colours["weights"]] == [k < 2 for k in range(len(texts))]


@WIDTHS
async def test_a_group_stands_side_by_side(width: int, tmp_path: Path, browser: str) -> None:
    page = write(tmp_path, group_of_three())
    async with opened(browser, f"{page.as_uri()}#r=smollm2-135m-0-1", width=width) as tab:
        await tab.click("button", "Its group")
        await tab.until("document.querySelectorAll('.member').length === 3")
        members = await tab.texts(".member")
        assert "score 1" in members[0]
        assert "adv +1.41" in members[0]
        assert "adv −0.71" in members[1]
        assert "solved at turn 2, then destroyed at turn 3" in members[1]
        assert "after each turn: 0, 1, 0" in members[1]
        assert "parts at turn 2" in members[1]
        assert "I remove it again: é ☃." in members[1]
        assert "parts at turn 1" in members[2]
        assert "Another way." in members[2]
        assert "verifier 1 · unknown_tools 0" in members[0]
        assert await tab.texts(".files h3") == ["sorted.txt"]
        assert (await tab.text(".diff")).split("\n") == ["  a", "- b", "+ x", "  "]
        await tab.picture(tmp_path / f"group-{width}.png")
        assert await tab.js("document.documentElement.scrollWidth") <= width
        assert await faults(tab) == []
        await tab.click(".member button", "smollm2-135m-0-2")
        await tab.until("document.querySelector('#detail h2')?.innerText === 'smollm2-135m-0-2'")


async def test_a_difference_far_into_a_long_prompt_is_drawn_and_found(tmp_path: Path, browser: str) -> None:
    record = make_record(turns=3)
    record.messages[1]["content"] = "Sort these: " + "word " * 5000
    record = tokenized(record)
    call = record.sampled_calls[2]
    position = len(call.prompt_ids) + 1
    assert position > 5000
    differences = {record.rollout_id: [[0, position, call.logprobs[1], call.logprobs[1] - 2.0, True]]}
    page = write(tmp_path, [record], differences=differences)
    seen = "(() => { const a = document.querySelector('.differs')?.getBoundingClientRect(), "
    seen += "b = document.querySelector('.tokens').getBoundingClientRect(); "
    seen += "return a && a.top >= b.top && a.bottom <= b.bottom && a.top > 60 && a.bottom < innerHeight; })()"
    async with opened(browser, f"{page.as_uri()}#r={record.rollout_id}") as tab:
        await tab.click("button", f"segment 1, position {position}")
        await tab.until(seen)
        assert "beyond the tolerance" in await tab.text(".token-facts")
    async with opened(browser, f"{page.as_uri()}#r={record.rollout_id}") as tab:
        await tab.click("button", "All tokens")
        await tab.until(seen)
        assert "beyond the tolerance" in await tab.text(".token-facts")  # though the pointer now rests on another


async def test_what_is_not_there_and_what_is_empty_are_different_ends(tmp_path: Path, browser: str) -> None:
    records = group_of_three()
    for record, left in zip(records, ({"constructor": ""}, {"constructor": "a\n"}, {}), strict=True):
        record.end_state = left
    page = write(tmp_path, records)
    async with opened(browser, f"{page.as_uri()}#g={records[0].group_id}", height=300) as tab:
        await tab.until("document.querySelectorAll('.diff').length === 2")
        assert await tab.texts(".diff .add") == ["+ a"]
        assert await tab.texts(".files > .meta") == [
            "1 of 1 file differs, and is shown against smollm2-135m-0-0, which has the best score.",
            "smollm2-135m-0-1",
            "smollm2-135m-0-2: not there",
        ]
        assert await tab.js("document.getElementById('detail').getBoundingClientRect().top") < 100


async def test_characters_that_would_hide_or_turn_a_text_are_seen(tmp_path: Path, browser: str) -> None:
    record = make_record(turns=2, policy="\u202edeniart ton")
    record.messages[1]["content"] = "say \u202elive\u202c and \x1b[2Kclear\x00"
    record.messages[2]["content"] = "a\x1b]0;title\x07b\tc"
    page = write(tmp_path, [tokenized(record)])
    async with opened(browser, f"{page.as_uri()}#r={record.rollout_id}") as tab:
        await tab.until("document.body.dataset.ready")
        shown = await tab.text("#detail")
        assert "say ‹U+202E›live‹U+202C› and ␛[2Kclear␀" in shown
        assert "a␛]0;title␇b\tc" in shown
        assert (await tab.text(".row .meta")).startswith("‹U+202E›deniart ton · ")
        await tab.click("button", "All tokens")
        tokens = await tab.until("document.querySelector('.tokens')?.innerText")
        assert "␛" in tokens
        assert not {"\u202e", "\x1b", "\x00"} & set(shown + tokens)


def two_runs() -> tuple[list[RolloutRecord], list[RolloutRecord]]:
    """Four items with two rollouts each: one fixed, one broken, one half better, one the same; one only in A."""
    scores_a = {0: (0.0, 0.0), 1: (1.0, 1.0), 2: (0.0, 1.0), 3: (1.0, 1.0), 4: (0.0, 0.0)}
    scores_b = {0: (1.0, 1.0), 1: (0.0, 0.0), 2: (1.0, 1.0), 3: (1.0, 1.0)}
    runs = []
    for scores, words in ((scores_a, "the old way"), (scores_b, "the new way")):
        records = [
            make_record(item=item, sample=n, turns=3, verifier_score=score)
            for item, pair in scores.items()
            for n, score in enumerate(pair)
        ]
        for record in records:
            record.messages[4]["content"] = words
        runs.append(records)
    return runs[0], runs[1]


async def read_difference(tab: Page) -> None:
    tiles = await tab.texts(".tile")
    # Differences +1, -1, +0.5, 0: mean 0.125; deviation 0.853913, error 0.426956, t(3) 3.182446: half 1.358764.
    assert tiles[0].split("\n")[1:] == ["+0.125", "95 % interval −1.234 to +1.484"]
    assert "0.625" in tiles[1]
    assert "0.750" in tiles[2]
    assert tiles[3].split("\n")[1:] == ["4", "1 only in A, 0 only in B"]
    assert "2 / 1 / 1" in tiles[4]
    assert "1 / 1" in tiles[5]


@WIDTHS
async def test_two_runs_are_compared_item_by_item(width: int, tmp_path: Path, browser: str) -> None:
    records_a, records_b = two_runs()
    found = compare(records_a, records_b, "before", "after")
    page = tmp_path / "compare.html"
    page.write_text(build_comparison(found, records_a, records_b), encoding="utf-8")
    async with opened(browser, page.as_uri(), width=width) as tab:
        await tab.until("document.body.dataset.ready")
        await read_difference(tab)
        assert len(await tab.js("[...document.querySelectorAll('.dot')].map((d) => d.dataset.items)")) == 4
        assert await tab.js("document.documentElement.scrollWidth") <= width
        await tab.picture(tmp_path / f"compare-{width}.png")
        assert await faults(tab) == []
        await tab.press("j")
        first = await tab.until("new URLSearchParams(location.hash.slice(1)).get('i')")
        await tab.press("j")
        await tab.until(f"new URLSearchParams(location.hash.slice(1)).get('i') !== {first!r}")
        await tab.press("k")
        await tab.until(f"document.querySelector('#detail h2')?.innerText === {first!r}")
        await tab.press("Escape")
        await tab.until("!new URLSearchParams(location.hash.slice(1)).get('i')")
        await tab.js(
            "(() => { const s = document.getElementById('change'); "
            "s.value = 'broken'; s.dispatchEvent(new Event('change')); })()"
        )
        assert await tab.text("#count") == "1 of 4 items"
        await tab.click(".row", "kind1:1")
        await tab.until("document.querySelector('.sides')")
        assert "They part at turn 2." in await tab.text("#detail")
        left, right = await tab.texts(".side")
        assert "score 1" in left
        assert "the old way" in left
        assert "score 0" in right
        assert "the new way" in right
        assert await tab.texts(".side > details > summary") == ["3 messages that both have"] * 2
        assert await tab.js("document.querySelector('#detail h2').getBoundingClientRect().bottom < innerHeight")
        await tab.picture(tmp_path / f"compare-item-{width}.png")
        assert await faults(tab) == []
        assert tab.requests == [page.as_uri()]
