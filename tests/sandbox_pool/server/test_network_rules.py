"""What the entries of a list of hosts mean."""

from __future__ import annotations

import ssl

import pytest

from sandbox_pool.server.network_rules import allowed, parse_rule
from sandbox_pool.server.slots.proxy import is_request, server_name


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


def greeting(host: str | None) -> bytes:
    """What a TLS client says first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    out = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=host).do_handshake()
    return out.read()


def with_bytes(record: bytes, before: bytes, more: bytes) -> bytes:
    """The greeting with more in its list of extensions."""
    at = record.index(before)
    ciphers = 44 + record[43]
    size_at = ciphers + 2 + int.from_bytes(record[ciphers : ciphers + 2], "big")
    size_at += 1 + record[size_at]
    longer = bytearray(record[:at] + more + record[at:])
    for place, width in ((3, 2), (6, 3), (size_at, 2)):
        size = int.from_bytes(record[place : place + width], "big") + len(more)
        longer[place : place + width] = size.to_bytes(width, "big")
    return bytes(longer)


def test_a_greeting_that_names_several_hosts_names_none() -> None:
    def named(host: bytes) -> bytes:
        entry = b"\0" + len(host).to_bytes(2, "big") + host
        names = len(entry).to_bytes(2, "big") + entry
        return b"\0\0" + len(names).to_bytes(2, "big") + names

    plain = greeting("site.example")
    assert server_name(plain) == "site.example"
    assert server_name(greeting(None)) is None
    for other in (b"other.example", b"site.example"):
        assert server_name(with_bytes(plain, named(b"site.example"), named(other))) == ""
    assert server_name(with_bytes(plain, named(b"site.example"), b"\xfa\xfa\0\0")) == "site.example"
    assert server_name(plain[:-1]) == ""


@pytest.mark.parametrize("drawn", [b" /", b"\x85*", b" x://"])
def test_a_greeting_whose_random_bytes_read_like_a_request_is_none(drawn: bytes) -> None:
    plain = greeting("site.example")
    unlucky = plain[:11] + (drawn * 32)[:32] + plain[43:]
    assert server_name(unlucky) == "site.example"
    assert not is_request(unlucky)
    assert is_request(unlucky.replace(b"\x16", b"G", 1))
