"""One self-contained HTML page from rollout records.

The page loads nothing: styles and scripts are inlined and named by hash in its content security policy, so that even
markup that slipped through could not run. Data is JSON in gzip in base64, which cannot be taken for markup and is a
tenth of the size; the scripts build the page with textContent only. Conversations and tokens are packed by the hundred
and unpacked when one of them is opened: a file of twenty thousand rollouts opens as fast as one of ten.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import orjson

from agent_loop.records.record import RolloutRecord
from environments.atropos.advantages import Baseline
from environments.runs.report.view_model import add_advantages, detail, index_entry
from environments.runs.summary import mean, summarize

if TYPE_CHECKING:
    from environments.runs.comparison import Comparison


class UnreadableRun(ValueError):
    """The file holds no rollouts; the message names the line and what is wrong with it."""


def find_rollouts(path: Path) -> Path:
    """The file itself, or the rollouts.jsonl of a run's folder."""
    return path / "rollouts.jsonl" if path.is_dir() else path


def read_rollouts(path: Path) -> Iterator[RolloutRecord]:
    """Records one by one; an unfinished last line (no newline) is skipped, any other bad line is an error."""
    return (record for _, record in rollouts_with_places(path))


def rollouts_with_places(path: Path) -> Iterator[tuple[int, RolloutRecord]]:
    """The same, each with the byte at which its line begins: enough to read it again."""
    place = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            begins, place = place, place + len(line)
            if not line.strip():
                continue
            try:
                yield begins, RolloutRecord.from_json(line)
            except ValueError as error:
                if not line.endswith(b"\n") and number > 1:
                    return
                raise UnreadableRun(f"{path}, line {number}: {error}") from error


SCRIPTS = ("dom.js", "store.js", "charts.js", "tokens.js", "detail.js", "group.js", "list.js", "live.js", "app.js")
COMPARE_SCRIPTS = ("dom.js", "store.js", "charts.js", "tokens.js", "detail.js", "group.js", "list.js", "compare.js")
STYLES = ("page.css", "detail.css", "tokens.css")
MAX_CHARS = 20_000
CHUNK_BYTES = 400_000


def pack(value: Any, level: int = 6) -> str:
    """A value as text of letters, digits, +, / and =, which is inert wherever it stands."""
    data = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    return base64.b64encode(gzip.compress(data, level, mtime=0)).decode()


class PageData:
    """What the page knows of the rollouts it is given one by one; nothing of a rollout is kept that it can do without.

    `differences` are what `verify --against` found, by rollout: [segment, position, stored, again].
    """

    def __init__(
        self,
        *,
        max_chars: int = MAX_CHARS,
        with_tokens: bool = True,
        differences: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self.entries: list[dict[str, Any]] = []
        self.vocabularies: list[dict[str, Any]] = []
        self.light: list[RolloutRecord] = []
        self._max_chars, self._with_tokens, self._differences = max_chars, with_tokens, differences or {}

    def add(self, record: RolloutRecord, **more: Any) -> dict[str, Any]:
        """Take a rollout, which is left without its messages and tokens; its detail. `more` goes into its index."""
        self.entries.append(index_entry(record) | more)
        shown = detail(record, self._max_chars, self._with_tokens)
        if found := self._differences.get(record.rollout_id):
            shown["differences"] = found
        if self._with_tokens and record.pieces:
            shown["vocabulary"] = self._vocabulary(record.pieces)
        record.messages, record.tools, record.segments, record.sampled_calls = [], [], [], []
        record.pieces, record.end_state = {}, {}
        self.light.append(record)
        return shown

    def _vocabulary(self, pieces: Mapping[str, Any]) -> int:
        """The number of the first table that says the same about these tokens: a run may have several tokenizers."""
        for number, known in enumerate(self.vocabularies):
            if all(known.get(token, piece) == piece for token, piece in pieces.items()):
                known.update(pieces)
                return number
        self.vocabularies.append(dict(pieces))
        return len(self.vocabularies) - 1


def build_report(
    records: Iterable[RolloutRecord],
    *,
    title: str,
    max_chars: int = MAX_CHARS,
    with_tokens: bool = True,
    baseline: Baseline = "normalized",
    differences: Mapping[str, Sequence[Any]] | None = None,
    label: Callable[[RolloutRecord], str] | None = None,
) -> str:
    """The page as a string. Texts longer than `max_chars` are cut in the middle; `label` names a rollout's step."""
    data = PageData(max_chars=max_chars, with_tokens=with_tokens, differences=differences)
    chunks = _Chunks(data.add(record, **({} if label is None else {"step": label(record)})) for record in records)
    add_advantages(data.entries, baseline)
    index = {
        "title": title,
        "baseline": baseline,
        "summary": summarize(data.light).to_dict(),
        "rollouts": data.entries,
        "chunks": chunks.sizes,
    }
    return build_page("page.html", SCRIPTS, title=title, blobs=_blobs(index, data, chunks))


def build_comparison(
    found: Comparison,
    records_a: Sequence[RolloutRecord],
    records_b: Sequence[RolloutRecord],
    *,
    max_chars: int = MAX_CHARS,
    with_tokens: bool = True,
) -> str:
    """The page of two runs: figures, a scatter, and the rollouts of every matched item side by side."""
    data = PageData(max_chars=max_chars, with_tokens=with_tokens)
    sides = [(record.item_id, side) for side, records in enumerate((records_a, records_b)) for record in records]
    chunks = _Chunks(data.add(record) for record in (*records_a, *records_b))
    numbers: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for number, key in enumerate(sides):
        numbers[key].append(number)
    items = [
        {
            "id": pair.item_id,
            "category": pair.category,
            "difference": pair.difference,
            "flip": pair.flip,
            "mean_a": mean(pair.scores_a),
            "mean_b": mean(pair.scores_b),
            "a": numbers[pair.item_id, 0],
            "b": numbers[pair.item_id, 1],
        }
        for pair in found.pairs
    ]
    comparison = found.to_dict() | {"pairs": None}
    index = {"comparison": comparison, "items": items, "rollouts": data.entries, "chunks": chunks.sizes}
    title = f"{found.name_a} against {found.name_b}"
    return build_page("compare.html", COMPARE_SCRIPTS, title=title, blobs=_blobs(index, data, chunks))


class _Chunks:
    """Details, packed by the hundred: small enough to unpack within a frame, large enough to be packed well."""

    def __init__(self, details: Iterable[dict[str, Any]]) -> None:
        self.elements: list[str] = []
        self.sizes: list[int] = []
        parts: list[bytes] = []
        for shown in details:
            parts.append(orjson.dumps(shown, option=orjson.OPT_NON_STR_KEYS))
            if sum(map(len, parts)) >= CHUNK_BYTES:
                self._close(parts)
                parts = []
        if parts:
            self._close(parts)

    def _close(self, parts: list[bytes]) -> None:
        packed = pack(orjson.Fragment(b"[" + b",".join(parts) + b"]"))
        self.elements.append(_element(f"chunk-{len(self.sizes)}", packed))
        self.sizes.append(len(parts))


def _blobs(index: Mapping[str, Any], data: PageData, chunks: _Chunks) -> str:
    return "\n".join((embedded("index", index), embedded("vocabularies", data.vocabularies), *chunks.elements))


def embedded(name: str, value: Any) -> str:
    """A value as an element of a page."""
    return _element(name, pack(value))


def _element(name: str, packed: str) -> str:
    return f'<script type="application/gzip" id="{name}">{packed}</script>'


def build_page(name: str, scripts: Sequence[str], *, title: str, blobs: str, connect: str = "'none'") -> str:
    """A page of the folder `page` with its scripts and styles in it; `connect` is where its scripts may ask."""
    folder = files("environments.runs.report") / "page"
    script = "\n".join((folder / part).read_text("utf-8") for part in scripts)
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    style = "\n".join((folder / part).read_text("utf-8") for part in STYLES)
    template = Template((folder / name).read_text("utf-8"))
    return template.substitute(
        title=escape(title),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        connect=connect,
        blobs=blobs,
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
