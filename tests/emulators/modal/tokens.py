"""Tokens the server hands out, and which of them it still takes."""

from __future__ import annotations

import base64
import json
import secrets
import time


def _part(value: dict[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


class Tokens:
    """JWTs with an end; the SDK reads that end, so it must be in them."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}

    def issue(self, ttl_s: float) -> str:
        """One that is taken for so long."""
        end = time.time() + ttl_s
        token = f"{_part({'alg': 'none'})}.{_part({'exp': end, 'jti': secrets.token_hex(8)})}.x"
        self._ends[token] = end
        return token

    def valid(self, token: str) -> bool:
        """Handed out here and not ended."""
        return self._ends.get(token, 0.0) > time.time()

    def expire(self) -> None:
        """None of those handed out so far is taken any longer, whatever they say themselves."""
        self._ends.clear()
