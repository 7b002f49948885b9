"""Parsers by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tool_parsers import engine
from tool_parsers.detect import format_of_template, format_of_text
from tool_parsers.formats import FORMATS
from tool_parsers.response_template import format_from
from tool_parsers.result import Parsed
from tool_parsers.schema import Tools
from tool_parsers.spec import Format, Start
from tool_parsers.text import Text


class UnknownParser(ValueError):
    """No parser has this name; the message gives the nearest names."""

    def __init__(self, name: str, nearest: Sequence[str]) -> None:
        self.name = name
        self.nearest = tuple(nearest)
        hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
        super().__init__(f"no parser is named {name!r}{hint} (list_parsers() has them all)")


@dataclass(frozen=True)
class Parser:
    """One format, ready to parse."""

    form: Format
    strict: bool = False

    @property
    def name(self) -> str:
        """The canonical name of the format."""
        return self.form.name

    def parse(self, text: str, tools: Sequence[Any] | Tools | None = None, start: Start | None = "content") -> Parsed:
        """Take one assistant turn apart; never raises on any text.

        `tools` are OpenAI's schemas, or what `Tools.of` read from them. `start` says where the prompt left off:
        `content`, `reasoning` (the prompt opened the thinking), `header` (message-structured formats), or None when
        that is not known.
        """
        return engine.run(self.form, text, Tools.of(tools), start, self.strict)


def _key(name: str) -> str:
    return re.sub(r"[\s.\-]+", "_", name.strip().lower())


_BY_NAME: dict[str, Format] = {}
for _form in FORMATS:
    for _alias in (_form.name, *_form.aliases):
        _BY_NAME.setdefault(_key(_alias), _form)


def _recognised(text: Text) -> Format:
    return _BY_NAME[format_of_text(text)]


AUTO = Format("auto", None, aliases=("detect",), adapt=_recognised, models="recognised from the markers in the text")
_BY_NAME["auto"] = AUTO


def list_parsers(aliases: bool = False) -> list[str]:
    """The names of all formats, optionally with their aliases."""
    names = {form.name for form in (*FORMATS, AUTO)}
    if aliases:
        names |= set(_BY_NAME)
    return sorted(names)


def get_parser(
    name: str | None = None,
    *,
    template: str | None = None,
    response_template: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> Parser:
    """The parser of this name or alias, or for a chat template's source, or for a tokenizer's `response_template`.

    `strict=True` turns every repair into an error.
    """
    if name is None and response_template is not None:
        return Parser(format_from(response_template), strict)
    if name is None:
        if template is None:
            raise TypeError("get_parser needs a name, a template or a response_template")
        name = format_of_template(template) or "plain"
    form = _BY_NAME.get(_key(name))
    if form is None:
        raise UnknownParser(name, difflib.get_close_matches(_key(name), sorted(_BY_NAME), n=3, cutoff=0.5))
    return Parser(form, strict)


def parse(
    text: str, parser: str, tools: Sequence[Any] | None = None, start: Start | None = "content", *, strict: bool = False
) -> Parsed:
    """Parse one text with the parser of this name."""
    return get_parser(parser, strict=strict).parse(text, tools, start)
