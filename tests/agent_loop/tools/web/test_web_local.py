"""The offline web: the right page first, the same answer every time, clear errors for a bad corpus."""

import json

import pytest

from agent_loop.tools.web.web_local import LocalWeb
from agent_loop.tools.web.web_tools import Page, WebFault

PAGES = [
    Page("http://a/python", "Python", "Python is a programming language. It has lists and dictionaries."),
    Page("http://a/snakes", "Snakes", "A python is a large snake. Snakes eat mice. " * 5),
    Page("http://a/rust", "Rust", "Rust is a programming language without a garbage collector."),
]


async def test_the_page_about_it_comes_first():
    web = LocalWeb(PAGES)
    assert next(hit.url for hit in await web.search("python programming language", 5)) == "http://a/python"
    assert [hit.url for hit in await web.search("snake mice", 1)] == ["http://a/snakes"]


async def test_pages_without_any_word_of_the_query_are_no_hits():
    assert await LocalWeb(PAGES).search("quantum", 5) == []
    assert await LocalWeb([]).search("x", 5) == []


async def test_the_limit_is_kept_and_the_order_is_stable():
    web = LocalWeb(PAGES)
    first = await web.search("is a", 2)
    assert len(first) == 2
    assert first == await LocalWeb(reversed(PAGES)).search("is a", 2)


async def test_the_description_shows_where_the_words_are():
    page = Page("u", "t", "filler " * 200 + "the needle is here")
    (hit,) = await LocalWeb([page]).search("needle", 1)
    assert "needle is here" in hit.description


async def test_pages_are_fetched_by_address():
    web = LocalWeb(PAGES)
    assert (await web.fetch("http://a/rust")).title == "Rust"
    assert (await web.fetch("http://a/rust/")).title == "Rust"
    assert (await web.fetch("http://a/rust#history")).title == "Rust"
    with pytest.raises(WebFault, match="cannot be reached"):
        await web.fetch("http://a/none")


async def test_a_corpus_file_is_read_and_read_again_when_it_changes(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"url": "u1", "title": "One", "text": "first"}) + "\n\n")
    assert (await LocalWeb.from_file(path).fetch("u1")).text == "first"
    assert LocalWeb.from_file(path) is LocalWeb.from_file(path)
    path.write_text(json.dumps({"url": "u1", "title": "One", "text": "second version"}) + "\n")
    assert (await LocalWeb.from_file(path).fetch("u1")).text == "second version"


@pytest.mark.parametrize("line", ["{", "[1]", '{"url": "x"}', "null"])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"url": "u", "text": "t"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"corpus\.jsonl:2"):
        LocalWeb.from_file(path)
