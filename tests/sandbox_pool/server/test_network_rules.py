"""What the entries of a list of hosts mean."""

from __future__ import annotations

import pytest

from sandbox_pool.server.network_rules import allowed, parse_rule


@pytest.mark.parametrize(
    ("entry", "host", "port", "expected"),
    [
        ("example.org", "example.org", 443, True),
        ("example.org", "example.org", 80, True),
        ("example.org", "example.org", 22, False),
        ("example.org:8443", "example.org", 8443, True),
        ("example.org:8443", "example.org", 443, False),
        ("example.org:*", "example.org", 22, True),
        ("Example.ORG.", "example.org", 443, True),
        ("bücher.example", "xn--bcher-kva.example", 443, True),
        ("*.example.net", "example.net", 443, False),
        ("*.example.net", "a.b.example.net", 443, True),
        ("*.example.net", "notexample.net", 443, False),
        ("*", "anything.example", 443, True),
        ("*", "anything.example", 22, False),
        ("93.184.216.34", "93.184.216.34", 80, True),
        ("[2606:2800:220:1::34]:443", "2606:2800:220:1::34", 443, True),
    ],
)
def test_an_entry_means(entry: str, host: str, port: int, expected: bool) -> None:
    assert allowed([parse_rule(entry)], host, port) is expected


@pytest.mark.parametrize(
    "entry",
    [
        *(
            "",
            "https://example.org",
            "example.org/path",
            "a.*.org",
            "*example.org",
            "example.org:0",
            "example.org:70000",
        ),
        *(
            "localhost",
            "127.0.0.1",
            "10.0.0.1",
            "[::1]",
            "[::ffff:1.2.3.4]",
            "*.1.2.3.4",
            "a b",
            "x" * 300,
            "[::1",
            "a:b:c",
        ),
    ],
)
def test_an_entry_that_means_nothing_is_refused_in_one_sentence(entry: str) -> None:
    with pytest.raises(ValueError, match=r"is not a |cannot be allowed|an address has no") as refused:
        parse_rule(entry)
    assert "\n" not in str(refused.value)
