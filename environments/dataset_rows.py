"""Rows of a dataset: a JSON Lines file, a Parquet file, or a name that the package `datasets` knows."""

from __future__ import annotations

import gzip
import random
import zlib
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson

Row = TypeVar("Row")
FILES = (".jsonl", ".jsonl.gz", ".parquet")


class DatasetUnavailable(RuntimeError):
    """A dataset cannot be read; the message says what to install or correct."""


def dataset_rows(source: str, split: str) -> list[dict[str, Any]]:
    """All rows. What does not end like a file is a name for `datasets`, which may be a folder; it has splits."""
    return file_rows(Path(source)) if source.endswith(FILES) else hub_rows(source, split)


def in_epochs(rows: Sequence[Row], number: int, seed: int) -> Row:
    """The rows in order; from the second time on in another order each time, which the seed fixes."""
    epoch, place = divmod(number, len(rows))
    order = list(range(len(rows)))
    if epoch:
        random.Random(f"{seed}:{epoch}").shuffle(order)
    return rows[order[place]]


def file_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl, .jsonl.gz or .parquet file."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetUnavailable(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path, data)


def _json_rows(path: Path, data: bytes) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(data.removeprefix(BOM_UTF8).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise DatasetUnavailable(f"{path}, line {number} is not JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise DatasetUnavailable(f"{path}, line {number} is not a JSON object")
        rows.append(row)
    return rows


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DatasetUnavailable(f"{path} needs the package pyarrow: pip install 'hermes-rl[parquet]'") from error
    try:
        rows: list[dict[str, Any]] = [_without_nulls(row) for row in parquet.read_table(path).to_pylist()]
    except (ArrowException, OSError) as error:
        raise DatasetUnavailable(f"cannot read {path}: {error}") from error
    return rows


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose columns hold nothing that is null: Arrow gives every object the keys of all objects in its column."""
    return {name: _pruned(value) for name, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _pruned(one) for name, one in value.items() if one is not None}
    return [_pruned(one) for one in value] if isinstance(value, list) else value


def hub_rows(name: str, split: str, config: str | None = None) -> list[dict[str, Any]]:
    """Rows of a dataset by the name that `datasets.load_dataset` takes, such as bigcode/humanevalpack."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DatasetUnavailable(f"{name} needs the package datasets: pip install datasets") from error
    try:
        return [_without_nulls(row) for row in load_dataset(name, config, split=split)]
    except Exception as error:  # whatever it raises for a wrong name, a missing split or no network
        raise DatasetUnavailable(f"cannot load {name!r} (split {split!r}): {error}") from error
