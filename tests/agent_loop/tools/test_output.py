"""Escapes go, secrets we hold go, everything else stays; budgets keep head and tail."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.tools.output import Redactor, cap_bytes, cut_line, strip_ansi


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[1;32;48;5;12mx\x1b[m", "x"),
        ("\x1b]0;title\x07prompt$ ", "prompt$ "),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x1b[2K\x1b[1Gb", "ab"),
        ("\x1b(Bplain", "plain"),
        ("\x1bPq#0;2\x1b\\after", "after"),
        ("\x9b31mred", "red"),
        ("\x1b[?25lhidden cursor\x1b[?25h", "hidden cursor"),
        ("tab\tnewline\nreturn\rbell\x07", "tab\tnewline\nreturn\rbell\x07"),
        ("[31m is not an escape", "[31m is not an escape"),
    ],
)
def test_terminal_escapes_are_removed_and_nothing_else(raw, clean):
    assert strip_ansi(raw) == clean


@given(st.text())
def test_stripping_twice_is_stripping_once_when_no_escape_is_left(text):
    once = strip_ansi(text)
    if "\x1b" not in once and "\x9b" not in once:
        assert strip_ansi(once) == once


@given(st.text(alphabet=st.characters(blacklist_characters="\x1b\x9b")))
def test_text_without_escapes_is_never_touched(text):
    assert strip_ansi(text) == text


def test_an_unfinished_string_escape_does_not_swallow_the_output():
    assert "important" in strip_ansi("\x1b]0;no end\nimportant")


def test_values_of_secret_variables_are_hidden():
    redact = Redactor.for_environment({"API_KEY": "sk-12345678", "HOME": "/home/user", "MODE": "longer-value"})
    assert redact("key=sk-12345678 in /home/user, longer-value") == "key=[REDACTED:API_KEY] in /home/user, longer-value"


def test_variables_named_by_the_user_are_hidden_too():
    redact = Redactor.for_environment({"MODE": "longer-value"}, names=["MODE"])
    assert redact("longer-value") == "[REDACTED:MODE]"


def test_things_that_only_look_like_secrets_are_left_alone():
    redact = Redactor.for_environment({"API_KEY": "sk-12345678"})
    text = "sk-other-key password=hunter22 ghp_abcdefghijklmnop AKIAIOSFODNN7EXAMPLE"
    assert redact(text) == text


def test_short_values_are_not_searched_for():
    assert Redactor({"TOKEN": "abc"})("abcdef") == "abcdef"


def test_a_secret_inside_another_is_not_half_replaced():
    redact = Redactor({"A_KEY": "12345678", "B_KEY": "12345678-90"})
    assert redact("12345678-90 12345678") == "[REDACTED:B_KEY] [REDACTED:A_KEY]"


@given(st.text(min_size=0, max_size=400), st.integers(1, 200))
def test_capping_keeps_head_and_tail_within_the_limit(text, limit):
    capped, omitted = cap_bytes(text, limit)
    size = len(text.encode("utf-8", "replace"))
    if size <= limit:
        assert (capped, omitted) == (text, 0)
        return
    head, _, tail = capped.partition("\n\n... [")
    tail = tail.split("] ...\n\n", 1)[1]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head.encode()) + len(tail.encode()) <= limit
    assert omitted == size - len(head.encode()) - len(tail.encode())


def test_the_head_gets_forty_percent_and_the_tail_sixty():
    capped, omitted = cap_bytes("h" * 5000 + "t" * 5000, 1000)
    assert (capped.count("h"), omitted) == (400, 9000)
    assert capped.endswith("t" * 600)


def test_a_cut_line_says_how_long_it_was():
    assert cut_line("x" * 10, 10) == "x" * 10
    assert cut_line("x" * 1234, 10) == "xxxxxxxxxx... [line of 1,234 characters cut]"


@pytest.mark.parametrize(
    "secret",
    [
        "sk-ant-" + "a" * 24, "ghp_" + "a" * 36, "AKIA" + "A" * 16, "hf_" + "x" * 30,
        "xoxb-1234567890-abcdef", "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2Q", "AIza" + "b" * 35,
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    ],
)  # fmt: skip
def test_shapes_of_secrets_are_hidden_only_when_asked(secret):
    text = f"before {secret} after"
    assert Redactor({}, shapes=True)(text) == "before [REDACTED] after"
    assert Redactor({})(text) == text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("PASSWORD=hunter2", "PASSWORD=[REDACTED]"),
        ("export DB_PASS='abc def1'", "export DB_PASS='abc def1'"),
        ("export DB_PASS='abcdef1'", "export DB_PASS='[REDACTED]'"),
        ("a?access_token=abc12345&y=1", "a?access_token=[REDACTED]&y=1"),
        ('{"apiKey": "opaque12345", "name": "John"}', '{"apiKey": "[REDACTED]", "name": "John"}'),
        ("x-api-key: opaque12345", "x-api-key: [REDACTED]"),
        ("bot123456789:" + "A" * 35, "bot[REDACTED]"),
        ("API_KEY=os.getenv('OTHER_KEY')", "API_KEY=os.getenv('OTHER_KEY')"),
        ("TOKEN=$OTHER TOKEN=<yours>", "TOKEN=$OTHER TOKEN=<yours>"),
        ("KEYBOARD=notsecret max_tokens=1000 token: CPU", "KEYBOARD=notsecret max_tokens=1000 token: CPU"),
    ],
)
def test_values_whose_name_says_that_they_are_secret_are_hidden(before, after):
    assert Redactor({}, shapes=True)(before) == after


def test_the_name_of_a_held_secret_stays_beside_the_shapes():
    assert Redactor({"TOKEN": "abcdefgh"}, shapes=True)("TOKEN=abcdefgh") == "TOKEN=[REDACTED:TOKEN]"


def test_passwords_in_addresses_and_bearer_tokens_are_hidden_and_ordinary_text_is_not():
    redact = Redactor({}, shapes=True)
    assert redact("postgres://me:hunter22@db/x") == "postgres://[REDACTED]@db/x"
    assert redact("Authorization: Bearer abcdefghij0123456789") == "Authorization: Bearer [REDACTED]"
    for text in ("task-sk-1", "https://example.org/a@b", "sha256:" + "a" * 64, "eyJ.a.b", "hf_hub_download(repo)"):
        assert redact(text) == text
