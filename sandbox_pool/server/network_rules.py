"""Which hosts a slot may reach, and which addresses nobody may reach through it.

Part of the packed server and of the client's checks: standard library, Python 3.9.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

DEFAULT_PORTS = (80, 443)
EGRESS = ("*:*",)
"""What `network: egress` stands for: every public host, every port."""
MOST_NAME = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::(\*|\d{1,5}))?")
Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]  # noqa: UP007 - evaluated by Python 3.9


class Rule(NamedTuple):
    """One entry of an allow-list."""

    name: str
    """A host name or an address; empty: every host."""
    below: bool
    """`*.name`: the names below it, not the name itself."""
    ports: Optional[tuple[int, ...]]  # noqa: UP045
    """None: every port."""


def parse_rule(text: str) -> Rule:
    """`example.org`, `*.example.net:443`, `*`, `192.0.43.10`, `[2606:4700::1]:443`; ports default to 80 and 443."""
    match = _AUTHORITY.fullmatch(text.strip())
    if "://" in text or "/" in text:
        raise ValueError(f"{text!r} is not a host: leave out the scheme and the path, as in 'example.org:443'")
    if match is None or not match[1]:
        raise ValueError(f"{text!r} is not a host, as in 'example.org', '*.example.org' or 'example.org:443'")
    ports = DEFAULT_PORTS if match[2] is None else None if match[2] == "*" else (parse_port(match[2]),)
    if match[1] == "*":
        return Rule("", True, ports)
    below = match[1].startswith("*.")
    name = normal_host(match[1][2:] if below else match[1])
    address = as_address(name)
    reason = refusal(address) if address else None
    if reason or name == "localhost" or name.endswith(".localhost"):
        raise ValueError(f"{text!r} cannot be allowed: it is {reason or 'this machine'}")
    if below and address:
        raise ValueError(f"{text!r}: an address has no names below it")
    return Rule(name, below, ports)


def parse_port(text: str) -> int:
    """1 to 65535."""
    port = int(text)
    if not 0 < port < 65536:
        raise ValueError(f"{text} is not a port")
    return port


def normal_host(text: str) -> str:
    """A name in its one spelling (lower case, ASCII, without the last dot), or an address without brackets."""
    if text.startswith("["):
        try:
            return str(ipaddress.IPv6Address(text[1:-1]))
        except ValueError:
            raise ValueError(f"{text!r} is not an address") from None
    name = text.lower()
    name = name[:-1] if name.endswith(".") else name
    if not name.isascii():
        try:
            name = name.encode("idna").decode()
        except UnicodeError:
            raise ValueError(f"{text!r} is not a host name") from None
    if len(name) > MOST_NAME or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError(f"{text[:80]!r} is not a host name")
    return name


def as_address(host: str) -> Address | None:
    """The address when the host is written as one."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def allowed(rules: Sequence[Rule], host: str, port: int) -> bool:
    """Whether the list has this host, in its normal spelling, with this port."""
    for rule in rules:
        named = host.endswith(f".{rule.name}") if rule.below else host == rule.name
        if (named or not rule.name) and (rule.ports is None or port in rule.ports):
            return True
    return False


def rules_of(network: str | Mapping[str, Any]) -> list[Rule] | None:
    """The rules of a spec's `network`; None where no proxy is wanted."""
    entries = EGRESS if network == "egress" else network.get("allow") if isinstance(network, Mapping) else None
    return None if entries is None else [parse_rule(str(entry)) for entry in entries]


_REFUSED = {
    "this machine": ("0.0.0.0/8", "127.0.0.0/8", "::/128", "::1/128"),
    "a link-local address": ("169.254.0.0/16", "fe80::/10"),
    "a private address": (
        "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "198.18.0.0/15", "fc00::/7", "fec0::/10",
    ),
    "a multicast or reserved address": (
        "224.0.0.0/4", "240.0.0.0/4", "192.0.0.0/24", "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24",
        "192.88.99.0/24", "ff00::/8", "100::/64", "2001:db8::/32", "3fff::/20", "5f00::/16",
    ),
    # What a translator makes of these is another address, which may be any of the above.
    "an IPv4 address in disguise": (
        "::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16",
    ),
}  # fmt: skip
_NETWORKS = [(ipaddress.ip_network(text), reason) for reason, texts in _REFUSED.items() for text in texts]


def refusal(address: Address) -> str | None:
    """Why nobody may reach this address through a slot; None for one of the public internet."""
    for network, reason in _NETWORKS:
        if address.version == network.version and address in network:
            return reason
    return "this machine" if _is_local(address) else None


def _is_local(address: Address) -> bool:
    """Whether this machine itself has the address, public as it may be: the kernel then answers from that address."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))  # sends nothing
            return bool(ipaddress.ip_address(probe.getsockname()[0]) == address)
        except OSError:  # no way there at all: connecting says so
            return False
