"""Items that are left out of training and evaluation, with the reason for each: the file that `validate` writes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from environments.errors import ConfigError

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv

log = logging.getLogger(__name__)

VERSION = 1
MOST_IN_A_ROW = 10_000
"""So many quarantined items one after the other mean that no other will come."""


class Quarantine:
    """The items of one list, and how often they were left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reasons = read_quarantine(path)
        self.left_out = 0

    async def next_item(self, env: HermesAgentBaseEnv) -> Any:
        """The next item that is not on the list; None when there are no more."""
        for _ in range(MOST_IN_A_ROW):
            item = await env.get_next_item()
            if item is None or env.item_id(item) not in self.reasons:
                return item
            self._leave_out(env.item_id(item))
        raise ConfigError(f"{self.path} lists the last {MOST_IN_A_ROW} items in a row: nothing is left to run")

    def allowed(self, env: HermesAgentBaseEnv, items: Sequence[Any]) -> list[Any]:
        """Those of the items that are not on the list."""
        kept = [item for item in items if env.item_id(item) not in self.reasons]
        for item in items:
            if env.item_id(item) in self.reasons:
                self._leave_out(env.item_id(item))
        if items and not kept:
            raise ConfigError(f"{self.path} lists all {len(items)} items: nothing is left to run")
        return kept

    def _leave_out(self, item_id: str) -> None:
        self.left_out += 1
        log.warning("item %s is left out: %s (%s)", item_id, self.reasons[item_id], self.path)


def read_quarantine(path: Path) -> dict[str, str]:
    """Item -> reason; ConfigError when this is not such a list."""
    try:
        data = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"env.quarantine: cannot read {path}: {error.strerror or error}") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"env.quarantine: {path} is not JSON: {error}") from error
    items = data.get("items") if isinstance(data, dict) else None
    if not isinstance(items, dict) or data.get("version") != VERSION:
        raise ConfigError(f"env.quarantine: {path} is not a list that `hermes-rl validate` wrote")
    return {str(item): str(reason) for item, reason in items.items()}


def quarantine_text(environment: str, reasons: Mapping[str, str]) -> bytes:
    """The list as a file."""
    data = {"version": VERSION, "environment": environment, "items": dict(sorted(reasons.items()))}
    return orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n"
