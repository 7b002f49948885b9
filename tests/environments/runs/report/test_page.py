"""The page itself: self-contained, inert data, and right in a real browser."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.runs.report import build_report
from environments.runs.report.html_page import embed_json
from support.chromium import dom, needs_chromium, screenshot
from support.records import make_record, make_run

HOSTILE = (
    "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    "<!--<script>\u2028\u2029&amp;"
)
MEASURE = """
onload = () => setTimeout(() => {
  const wide = [...document.querySelectorAll("iframe")].map((f) => f.contentDocument.documentElement.scrollWidth);
  document.title = "widths " + wide.join(" ");
}, 1000)
"""


def write(tmp_path: Path, records: list, title: str = "runs/x/rollouts.jsonl") -> Path:
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
def test_embedded_json_keeps_its_value_and_holds_no_markup(value: Any) -> None:
    text = embed_json(value)
    assert orjson.loads(text) == value
    assert not set(text) & set("<>&\u2028\u2029")


def test_the_page_loads_nothing_and_allows_only_its_own_script_and_style() -> None:
    text = build_report(make_run(items=2, samples=1), title="x")
    page = Elements(text)
    for tag, attributes in page.tags:
        assert not {"src", "href", "srcset", "action", "data", "onload", "onclick", "onerror"} & set(attributes), tag
    assert not {"link", "iframe", "img", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    policy = next(a["content"] or "" for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
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
    record = make_record(turns=2, policy=HOSTILE, category=HOSTILE, error=HOSTILE, rollout_id="bad")
    record.reward_components = {HOSTILE: 1.0}
    record.metrics[HOSTILE] = 1.0
    record.truncations = [{"turn": 1, HOSTILE: HOSTILE}]
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


@needs_chromium
def test_hostile_strings_are_shown_as_text_by_a_browser(tmp_path: Path) -> None:
    shown = dom(write(tmp_path, [hostile_record()], title="fine"), "r=bad&q=script")
    assert "<title>fine</title>" in shown
    body = shown[: shown.index('id="data"')]
    assert "<img" not in body
    assert body.count("<script") <= 1  # the data element that the cut leaves open
    assert "&lt;img src=x onerror" in body
    assert "<mark>script</mark>" in body


@needs_chromium
def test_a_browser_shows_figures_filters_and_conversations(tmp_path: Path) -> None:
    records = make_run(items=8, samples=2)
    records[16].messages[0]["content"] = "a needle in a prompt"
    page = write(tmp_path, records)
    everything = dom(page)
    for words in (
        "Mean score",
        "Lost, not scored",
        "Where the time went",
        "48 rollouts",
        "scripted-sloppy",
        "pass@2",
    ):
        assert words in everything
    assert everything.count('class="row"') == 48
    chosen = dom(page, f"policy={records[16].policy}&q=NEEDLE%20in&r={records[16].rollout_id}")
    assert "1 of 48" in chosen
    assert chosen.count('class="row"') == 1
    assert 'class="message user"' in chosen
    assert "<mark>needle in</mark>" in chosen
    assert "turn 1" in chosen


@needs_chromium
def test_a_thousand_rollouts_are_all_searched_and_few_are_drawn(tmp_path: Path) -> None:
    page = write(tmp_path, [make_record(item=i, turns=3) for i in range(1000)])
    found = dom(page, "q=agent%20agent%2031")  # words of every tool result
    assert "1,000 rollouts" in found
    assert 0 < found.count('class="row"') < 300  # the rest is made when it scrolls into view


@needs_chromium
def test_nothing_is_wider_than_a_phone_or_a_wide_screen(tmp_path: Path) -> None:
    """The policy of the page refuses a script that would measure it, so a page around it does."""
    write(tmp_path, make_run(items=4, samples=1))
    cases = [(width, state) for width in (390, 1600) for state in ("", "r=smollm2-135m-0-0")]
    frames = (f'<iframe src="report.html#{state}" width={width} height=900></iframe>' for width, state in cases)
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(f"{''.join(frames)}<script>{MEASURE}</script>")
    shown = re.search(r"<title>widths ([\d ]+)</title>", dom(wrapper, "", 1700, "--allow-file-access-from-files"))
    assert shown is not None
    for (width, state), found in zip(cases, map(int, shown[1].split()), strict=True):
        assert found <= width, f"{found} px at {width} px, state {state!r}"


@needs_chromium
@pytest.mark.parametrize("width", [390, 1600])
def test_a_screenshot_can_be_taken(width: int, tmp_path: Path) -> None:
    page = write(tmp_path, make_run(items=4, samples=2))
    picture = screenshot(page, tmp_path / "page.png", "r=smollm2-135m-0-0&theme=dark", width)
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000  # an empty page compresses to far less


def test_a_run_without_rollouts_still_makes_a_page() -> None:
    assert "<title>empty</title>" in build_report([], title="empty")
