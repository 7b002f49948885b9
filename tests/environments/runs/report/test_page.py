"""The page itself: self-contained, inert data, and right in a real browser."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.records.record import RolloutRecord
from environments.runs.report import build_report
from environments.runs.report.html_page import pack
from support.axe import faults
from support.browser import opened, shown
from support.records import make_record, make_run

HOSTILE = (
    "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    "<!--<script>\u2028\u2029&amp;"
)


def write(tmp_path: Path, records: list[RolloutRecord], title: str = "runs/x/rollouts.jsonl") -> Path:
    page = tmp_path / "report.html"
    page.write_text(build_report(records, title=title), encoding="utf-8")
    return page


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of script and style elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.inline.append((self.tags[-1][0], data))


@given(
    st.recursive(
        st.text() | st.none() | st.integers(-(2**53), 2**53), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_packed_data_keeps_its_value_and_holds_no_markup(value: Any) -> None:
    text = pack(value)
    assert orjson.loads(gzip.decompress(base64.b64decode(text))) == value
    assert re.fullmatch(r"[A-Za-z0-9+/=]*", text)


def test_the_page_loads_nothing_and_allows_only_its_own_script_and_style() -> None:
    text = build_report(make_run(items=2, samples=1), title="x")
    page = Elements(text)
    for tag, attributes in page.tags:
        assert not {"src", "href", "srcset", "action", "data", "onload", "onclick", "onerror"} & set(attributes), tag
    assert not {"link", "iframe", "img", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    policy = next(a["content"] or "" for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    style = next(data for tag, data in page.inline if tag == "style")
    script = page.inline[-1][1]
    for code in (style, script):
        assert base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() in policy
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|url\(|@import", style + script
    )


def test_hostile_strings_do_not_change_the_structure_of_the_page() -> None:
    plain = Elements(build_report([make_record()], title="x"))
    hostile = make_record(policy=HOSTILE, category=HOSTILE, error=HOSTILE, isolation=HOSTILE)
    hostile.messages[1]["content"] = HOSTILE
    found = Elements(build_report([hostile], title=HOSTILE))
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in plain.tags]


def hostile_record() -> Any:
    record = make_record(turns=2, policy=HOSTILE, category=HOSTILE, error=HOSTILE, rollout_id="bad", group_id="g")
    record.reward_components = {HOSTILE: 1.0}
    record.metrics[HOSTILE] = 1.0
    record.truncations = [{"turn": 1, HOSTILE: HOSTILE}]
    record.pieces = {"1": HOSTILE, "3": HOSTILE}
    record.end_state = {HOSTILE: HOSTILE}
    record.tool_calls[0] |= {
        "name": HOSTILE,
        "repairs": [HOSTILE],
        "error": HOSTILE,
        "raw_arguments": HOSTILE,
        "status": HOSTILE,
    }
    for message in record.messages:
        message["content"] = HOSTILE
        message["role"] = message["role"] if message["role"] != "system" else HOSTILE
    return record


@pytest.mark.parametrize("state", ["r=bad&q=script", "r=bad&v=tokens", "g=g"])
async def test_hostile_strings_are_shown_as_text_by_a_browser(state: str, tmp_path: Path, browser: str) -> None:
    page = write(tmp_path, [hostile_record()], title="fine")
    async with opened(browser, f"{page.as_uri()}#{state}") as tab:
        await tab.until("document.body.dataset.ready")
        assert await tab.js("document.title") == "fine"
        assert await tab.js("document.querySelectorAll('img, body script:not([type]):not(:last-of-type)').length") == 0
        assert "<img src=x onerror" in await tab.text("#detail")
        assert tab.requests == [page.as_uri()]


async def test_a_browser_shows_figures_filters_and_conversations(tmp_path: Path, browser: str) -> None:
    records = make_run(items=8, samples=2)
    records[16].messages[0]["content"] = "a needle in a prompt"
    wanted, policy = records[16].rollout_id, records[16].policy
    page = write(tmp_path, records)
    async with opened(browser, page.as_uri()) as tab:
        everything = await tab.until("document.body.dataset.ready && document.body.innerText")
        for words in ("Mean score", "Lost, not scored", "Where the time went", "48 rollouts", "pass@2"):
            assert words in everything
        await tab.js(f"location.hash = 'policy={policy}&q=NEEDLE%20in&r={wanted}'")
        await tab.until("document.getElementById('count').innerText === '1 of 48'")
        assert len(await tab.texts(".row")) == 1
        await tab.until("document.querySelector('mark')?.innerText === 'needle in'")
        assert "turn 1" in await tab.text(".message.assistant .who")


async def test_rows_exist_only_where_they_are_seen_and_every_rollout_is_searched(tmp_path: Path, browser: str) -> None:
    page = write(tmp_path, [make_record(item=i, turns=3) for i in range(1000)])
    async with opened(browser, page.as_uri()) as tab:
        await tab.until("document.body.dataset.ready")
        assert 0 < len(await tab.texts(".row")) < 60
        await tab.js("document.getElementById('list').scrollTop = 1e9")
        await tab.until("document.querySelector('[data-id=\"smollm2-135m-999-0\"]')")
        assert len(await tab.texts(".row")) < 60
        await tab.js("location.hash = 'q=notes999.txt'")  # the request of the last one
        await tab.until("document.getElementById('count').innerText === '1 of 1,000'")
        await tab.js("location.hash = 'q=agent%20agent%2031'")  # words of every tool result
        await tab.until("document.getElementById('count').innerText === '1,000 rollouts'")


async def test_everything_can_be_reached_with_the_keyboard(tmp_path: Path, browser: str) -> None:
    page = write(tmp_path, make_run(items=4, samples=2))
    async with opened(browser, page.as_uri()) as tab:
        await tab.until("document.body.dataset.ready")
        await tab.js("document.querySelector('.row').focus()")
        await tab.press("ArrowDown")
        await tab.press("Enter")
        assert await tab.until("new URLSearchParams(location.hash.slice(1)).get('r')") == "smollm2-135m-0-1"
        await tab.press("End")
        await tab.until("document.activeElement.dataset.id === 'scripted-sloppy-3-1'")
        await tab.press("j")
        await tab.until("new URLSearchParams(location.hash.slice(1)).get('r') === 'smollm2-135m-1-0'")
        await tab.press("t")
        await tab.until("document.querySelector('.segment .tokens .chosen')")
        await tab.js("document.querySelector('.segment .tokens').focus()")
        await tab.press("ArrowRight")
        assert (await tab.text(".token-facts")).startswith("id 4 ")  # the one after the first that was sampled
        await tab.press("g")
        await tab.until("document.querySelectorAll('.member').length === 2")
        await tab.press("Escape")
        await tab.until("!document.querySelector('.member')")
        await tab.press("Escape")
        await tab.until("!document.body.classList.contains('reading')")
        await tab.press("/")
        assert await tab.js("document.activeElement.id") == "search"


@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (390, "dark")])
async def test_the_page_fits_its_window_and_axe_finds_no_fault(
    width: int, theme: str, tmp_path: Path, browser: str
) -> None:
    page = write(tmp_path, make_run(items=4, samples=2))
    for state in ("", "r=smollm2-135m-0-0", "r=smollm2-135m-0-0&v=tokens", "g=smollm2-135m-g0"):
        async with opened(browser, f"{page.as_uri()}#{state}&theme={theme}", width=width) as tab:
            await tab.until("document.body.dataset.ready")
            assert await tab.js("document.documentElement.scrollWidth") <= width, state
            picture = await tab.picture(tmp_path / f"page-{width}-{theme}-{state[:1] or 'list'}.png")
            assert len(picture) > 10_000  # an empty page compresses to far less
            assert await faults(tab) == [], state


def test_a_run_without_rollouts_still_makes_a_page() -> None:
    assert "<title>empty</title>" in build_report([], title="empty")


async def test_a_run_without_rollouts_is_said_to_have_none(tmp_path: Path, browser: str) -> None:
    assert "No rollout passes these filters." in await shown(browser, write(tmp_path, []))
