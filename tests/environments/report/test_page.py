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
from support.chromium import dom, needs_chromium, screenshot
from support.records import make_record, make_run

from environments.report import build_report
from environments.report.build import embed_json

HOSTILE = (
    "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    "<!--<script>\u2028\u2029&amp;"
)
MEASURE = """
onload = () => setTimeout(() => {
  const page = document.getElementById("f").contentDocument;
  document.title = page ? page.documentElement.scrollWidth + " wide" : "closed";
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
    page = write(tmp_path, make_run(items=8, samples=2))
    everything = dom(page)
    for words in (
        "Mean score",
        "Lost to infrastructure",
        "Where the time went",
        "48 rollouts",
        "scripted-sloppy",
        "pass@2",
    ):
        assert words in everything
    rows = everything.count('class="row"')
    chosen = dom(page, "policy=scripted-good&score=solved&r=scripted-good-0-0")
    assert 0 < chosen.count('class="row"') < rows
    assert re.search(r"\d+ of 48", chosen)
    assert 'class="message user"' in chosen
    assert "turn 1" in chosen
    assert "Back to the list" in chosen


@needs_chromium
def test_search_finds_words_inside_tool_results_of_a_large_file(tmp_path: Path) -> None:
    records = [make_record(item=i, turns=3) for i in range(1000)]
    records[777].messages[3]["content"] = "total 8\nneedle-in-a-result\n"
    page = write(tmp_path, records)
    found = dom(page, "q=NEEDLE-in-a")
    assert "1 of 1,000" in found
    assert 'data-id="smollm2-135m-777-0"' in found
    assert found.count('class="row"') == 1
    everything = dom(page)
    assert "1,000 rollouts" in everything
    assert everything.count('class="row"') < 300  # the rest is made when it scrolls into view


@needs_chromium
def test_nothing_is_wider_than_a_phone_or_a_wide_screen(tmp_path: Path) -> None:
    """The policy of the page refuses a script that would measure it, so a page around it does."""
    write(tmp_path, make_run(items=4, samples=1))
    wrapper = tmp_path / "wrapper.html"
    for width in (390, 1600):
        for state in ("", "r=smollm2-135m-0-0"):
            frame = f'<iframe id=f src="report.html#{state}" width={width} height=900></iframe>'
            wrapper.write_text(f'<body style="margin:0">{frame}<script>{MEASURE}</script>')
            shown = _measure(wrapper)
            assert shown <= width, f"{shown} px at {width} px, state {state!r}"


def _measure(wrapper: Path) -> int:
    shown = dom(wrapper, "", 1700, "--allow-file-access-from-files")
    title = re.search(r"<title>(\d+) wide</title>", shown)
    assert title is not None, shown[:300]
    return int(title[1])


@needs_chromium
@pytest.mark.parametrize("width", [390, 1600])
def test_a_screenshot_can_be_taken(width: int, tmp_path: Path) -> None:
    page = write(tmp_path, make_run(items=4, samples=2))
    picture = screenshot(page, tmp_path / "page.png", "r=smollm2-135m-0-0&theme=dark", width)
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000  # an empty page compresses to far less


def test_a_run_without_rollouts_still_makes_a_page() -> None:
    assert "<title>empty</title>" in build_report([], title="empty")
