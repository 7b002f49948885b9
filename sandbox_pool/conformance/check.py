"""A check, its result, and the words checks are written with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from sandbox_pool.conformance.context import CheckContext

Body = Callable[["CheckContext"], Awaitable[None]]
Verdict = Literal["passed", "failed", "not promised"]
IS_ALIVE = 'grep -qs "^State:.[^ZX]" "/proc/$(cat pid)/status" && echo alive'
"""A command that says `alive` when the process whose number is in the file `pid` runs."""


class CheckFailed(AssertionError):
    """A promise was not kept; the message says what was seen instead."""


@dataclass(frozen=True)
class Check:
    """One promise. It holds at every level that offers all of `needs`."""

    group: str
    name: str
    promise: str
    needs: tuple[str, ...]
    body: Body
    timeout_s: float = 60.0

    @property
    def id(self) -> str:
        """Unique name: `group.name`."""
        return f"{self.group}.{self.name}"


@dataclass(frozen=True)
class CheckResult:
    """What became of one check."""

    id: str
    promise: str
    verdict: Verdict
    detail: str = ""
    """What was seen instead, or why it is not promised here."""
    duration_s: float = 0.0


def check(*needs: str, timeout_s: float = 60.0) -> Callable[[Body], Body]:
    """Mark a function as a check; its docstring is the promise."""

    def mark(body: Body) -> Body:
        body.__check__ = (needs, timeout_s)  # type: ignore[attr-defined]  # read back by the registry
        return body

    return mark


def expect(condition: object, seen: str) -> None:
    """Fail unless the condition holds. Not `assert`, which python -O would remove."""
    if not condition:
        raise CheckFailed(seen)


def expect_equal(actual: object, wanted: object, what: str = "value") -> None:
    """Fail unless both are equal."""
    if actual != wanted:
        raise CheckFailed(f"{what} is {_short(actual)}, not {_short(wanted)}")


@contextmanager
def expect_error(*kinds: type[Exception]) -> Iterator[None]:
    """Fail unless the block raises one of these."""
    try:
        yield
    except kinds:
        return
    names = " or ".join(kind.__name__ for kind in kinds)
    raise CheckFailed(f"{names} was not raised")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-80:]} ({len(text)} characters)"
