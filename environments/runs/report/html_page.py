"""One self-contained HTML page from rollout records.

The page loads nothing: styles and scripts are inlined and named by hash in its content security policy, so that even
markup that slipped through could not run. Data is embedded as JSON with every character escaped that could end a script
element, and the scripts build the page with textContent only. Conversations are separate data elements, parsed when
they are opened: a file of a thousand rollouts opens as fast as one of ten.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import orjson

from agent_loop.records.record import RolloutRecord
from environments.runs.report.view_model import detail, index_entry
from environments.runs.summary import summarize


class UnreadableRun(ValueError):
    """The file holds no rollouts; the message names the line and what is wrong with it."""


def find_rollouts(path: Path) -> Path:
    """The file itself, or the rollouts.jsonl of a run's folder."""
    return path / "rollouts.jsonl" if path.is_dir() else path


def read_rollouts(path: Path) -> Iterator[RolloutRecord]:
    """Records one by one; an unfinished last line (no newline) is skipped, any other bad line is an error."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield RolloutRecord.from_json(line)
            except ValueError as error:
                if not line.endswith(b"\n") and number > 1:
                    return
                raise UnreadableRun(f"{path}, line {number}: {error}") from error


SCRIPTS = ("dom.js", "charts.js", "detail.js", "list.js", "app.js")
STYLES = ("page.css", "detail.css")
MAX_CHARS = 20_000

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_TABLE = str.maketrans(_ESCAPES)


def embed_json(value: Any) -> str:
    """JSON that is inert inside a script element, whatever strings it holds."""
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode().translate(_TABLE)


def build_report(records: Iterable[RolloutRecord], *, title: str, max_chars: int = MAX_CHARS) -> str:
    """The page as a string. Texts longer than `max_chars` are cut in the middle."""
    entries, blobs, light = [], [], []
    for number, record in enumerate(records):
        entries.append(index_entry(record))
        blob = embed_json(detail(record, max_chars))
        blobs.append(f'<script type="application/json" id="rollout-{number}">{blob}</script>')
        light.append(_lighten(record))
    data = {"title": title, "summary": summarize(light).to_dict(), "rollouts": entries}
    return _page(title, embed_json(data), "\n".join(blobs))


def _lighten(record: RolloutRecord) -> RolloutRecord:
    """Drop what a summary does not need, so that large files fit in memory."""
    record.messages, record.tools, record.segments, record.sampled_calls = [], [], [], []
    return record


def _page(title: str, data: str, blobs: str) -> str:
    folder = files("environments.runs.report") / "page"
    script = "\n".join((folder / name).read_text("utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    style = "\n".join((folder / name).read_text("utf-8") for name in STYLES)
    template = Template((folder / "page.html").read_text("utf-8"))
    return template.substitute(
        title=escape(title),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=data,
        blobs=blobs,
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
