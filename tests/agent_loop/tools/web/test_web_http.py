"""The real web, on loopback: only allowed hosts are ever asked, redirects included; pages become text."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agent_loop.tools.config import HttpWebConfig
from agent_loop.tools.web.web_http import HttpWeb, decode_page, html_to_text
from agent_loop.tools.web.web_tools import WebFault


def always(make):
    async def answer(request):
        return make()

    return answer


@pytest.fixture
async def server():
    asked = []

    async def page(request):
        asked.append(request.path)
        return web.Response(text="<title> A  page </title><h1>Head</h1><p>One &amp; two</p>", content_type="text/html")

    async def elsewhere(request):
        raise web.HTTPFound(request.query["to"])

    async def search(request):
        results = [{"title": "T", "url": f"http://x/{n}", "content": request.query["q"]} for n in range(9)]
        return web.json_response({"results": [{"title": "no url"}, *results]})

    async def slow(request):
        await asyncio.sleep(30)

    app = web.Application()
    app.router.add_get("/page", page)
    app.router.add_get("/elsewhere", elsewhere)
    app.router.add_get("/search", search)
    app.router.add_get("/slow", slow)
    app.router.add_get("/image", always(lambda: web.Response(body=b"\x89PNG", content_type="image/png")))
    app.router.add_get("/plain", always(lambda: web.Response(text="plain text")))
    app.router.add_get("/bare", always(lambda: web.Response(body="<p>café".encode(), content_type="text/html")))
    app.router.add_get(
        "/odd", always(lambda: web.Response(body=b"x", headers={"Content-Type": "text/html; charset=x"}))
    )
    app.router.add_get("/big", always(lambda: web.Response(text="x" * 500_000)))
    app.router.add_get("/bad", always(lambda: web.Response(text="not json")))
    async with TestServer(app, host="127.0.0.1") as running:
        running.asked = asked
        yield running


def client(server, **more):
    settings = {"search_url": str(server.make_url("/search")), "allowed_hosts": ("127.0.0.1",), **more}
    return HttpWeb(HttpWebConfig(**settings))


async def test_a_page_becomes_title_and_text(server):
    async with client(server) as http:
        page = await http.fetch(str(server.make_url("/page")))
    assert (page.title, page.text) == ("A page", "# Head\n\nOne & two")


async def test_plain_text_is_left_as_it_is(server):
    async with client(server) as http:
        assert (await http.fetch(str(server.make_url("/plain")))).text == "plain text"


async def test_search_results_are_read_and_limited(server):
    async with client(server) as http:
        hits = await http.search("a & b", 3)
    assert [(hit.url, hit.description) for hit in hits] == [(f"http://x/{n}", "a & b") for n in range(3)]


@pytest.mark.parametrize("url", ["http://localhost:1/x", "http://example.org/", "http://127.0.0.1.evil.org/"])
async def test_other_hosts_are_not_asked(server, url):
    async with client(server) as http:
        with pytest.raises(WebFault, match="not on the list"):
            await http.fetch(url)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://127.0.0.1/", "gopher://127.0.0.1", "x", "", "http://", "http://[::1"]
)
async def test_only_web_addresses_are_taken(server, url):
    async with client(server) as http:
        with pytest.raises(WebFault):
            await http.fetch(url)


async def test_a_redirect_leaves_the_allowed_hosts_no_more_than_an_address(server):
    inside = server.make_url("/elsewhere").with_query(to=str(server.make_url("/page")))
    outside = server.make_url("/elsewhere").with_query(to=f"http://localhost:{server.port}/page")
    async with client(server) as http:
        assert (await http.fetch(str(inside))).title == "A page"
        server.asked.clear()
        with pytest.raises(WebFault, match="localhost is not on the list"):
            await http.fetch(str(outside))
    assert server.asked == []


async def test_endless_redirects_end(server):
    loop = server.make_url("/elsewhere").with_query(to="/elsewhere?to=/elsewhere")
    async with client(server, max_redirects=2) as http:
        with pytest.raises(WebFault):
            await http.fetch(str(loop))


@pytest.mark.parametrize(("path", "said"), [("/image", "image/png"), ("/none", "404")])
async def test_what_is_no_page_is_said(server, path, said):
    async with client(server) as http:
        with pytest.raises(WebFault, match=said):
            await http.fetch(str(server.make_url(path)))


async def test_large_pages_are_cut_and_slow_ones_given_up(server):
    async with client(server, max_page_bytes=1000, timeout_s=0.3) as http:
        assert len((await http.fetch(str(server.make_url("/big")))).text) == 1000
        with pytest.raises(WebFault, match="too long"):
            await http.fetch(str(server.make_url("/slow")))


async def test_a_search_engine_that_answers_nonsense_is_a_fault_for_the_model(server):
    for path in ("/bad", "/none"):
        async with client(server, search_url=str(server.make_url(path))) as http:
            with pytest.raises(WebFault):
                await http.search("x", 1)


async def test_wildcards_allow_hosts_below(server):
    http = HttpWeb(HttpWebConfig(search_url="http://x", allowed_hosts=("*.example.org",)))
    http._check("https://docs.example.org/a")
    with pytest.raises(WebFault):
        http._check("https://example.org.evil.net/")


def test_an_allow_list_is_needed():
    with pytest.raises(ValidationError):
        HttpWebConfig(search_url="http://x", allowed_hosts=())


def test_html_keeps_structure_and_drops_scripts():
    html = (
        "<head><style>x{}</style></head><body><script>evil()</script><ul><li>a<li>b</ul><table><tr><td>1<td>2</table>"
    )
    assert html_to_text(html)[1].split() == ["-", "a", "-", "b", "|", "1", "|", "2"]


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p title='a > b'>x</p>", "x"),
        ('<a href="x>y" b=c>one</a> <b>two</b>', "one two"),
        ("<p don't>it's</p>", "it's"),
        ("1 < 2 &lt; 3 <3", "1 < 2 < 3 <3"),
        ("a<!-- <b> -->b<!DOCTYPE x>c<?php d ?>e", "abce"),
        ("a<script>if (a</b/) '<p>'</script >b<STYLE>x</Style>c", "abc"),
        ("a<svg><g/></svg>b<svg/>c<br/>d", "abc\nd"),
        ("a<!-- never closed", "a"),
        ("a <b", "a"),
        ("é&eacute;&#233;&amp;lt;", "ééé&lt;"),
    ],
)
def test_text_is_what_a_browser_shows(html, text):
    assert html_to_text(html)[1] == text


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece", ["<a ", "<!--", "<b> </b>", "<a b='", '<a b="', "<", "&", "</", "<script>", "<![CDATA[", "="]
)
def test_a_hostile_page_takes_no_longer_than_another(piece):
    """html.parser would need hours for some of these."""
    html_to_text("<title>" + piece * (400_000 // len(piece)))
    html_to_text("<a " + piece * (400_000 // len(piece)))
    html_to_text(piece * (400_000 // len(piece)))


@given(st.text(alphabet="<>/!-abpscript&;\"'= \n", max_size=200))
def test_broken_html_never_raises(html):
    html_to_text(html)


async def test_pages_without_a_charset_or_with_one_that_does_not_exist_are_read(server):
    async with client(server) as http:
        assert (await http.fetch(str(server.make_url("/bare")))).text == "café"
        assert (await http.fetch(str(server.make_url("/odd")))).text == "x"


@pytest.mark.parametrize(
    ("data", "charset", "text"),
    [
        ("café".encode(), None, "café"),
        ("café".encode("latin-1"), "iso-8859-1", "café"),
        ("café".encode("cp1252"), None, "café"),
        ("café".encode("utf-8-sig"), "latin-1", "café"),
        ("café".encode("utf-16"), None, "café"),
        (b"caf\xe9", "utf-8", "caf\ufffd"),
        (b"caf\xe9", "base64", "café"),
        (b"caf\xe9", "undefined", "café"),
    ],
)
def test_a_page_is_decoded_by_its_mark_its_header_or_as_browsers_do(data, charset, text):
    assert decode_page(data, charset) == text


def test_what_a_page_says_of_itself_counts_where_the_header_is_silent():
    assert decode_page("café".encode()[:-1], None, cut_off=True) == "caf"
    page = '<html><head><meta charset="windows-1251"><title>Привет</title>'
    assert "Привет" in decode_page(page.encode("cp1251"), None)
    old = '<meta http-equiv="Content-Type" content="text/html; charset=shift_jis"><p>日本'
    assert "日本" in decode_page(old.encode("shift_jis"), None)


@pytest.mark.parametrize("name", ["punycode", "IDNA", "unicode_escape", "raw_unicode_escape", "utf_7"])
def test_an_encoding_that_no_browser_has_is_not_used(name):
    """A page of 2 MB in punycode would take minutes."""
    data = f"<meta charset={name}>".encode() + rb"a-b\u0041+AGE-"
    assert decode_page(data, name) == decode_page(data, None) == data.decode()


@given(data=st.binary(max_size=80), charset=st.none() | st.text(max_size=12))
def test_decoding_never_raises(data, charset):
    assert isinstance(decode_page(data, charset), str)
