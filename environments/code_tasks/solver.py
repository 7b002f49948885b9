"""Runs inside the sandbox: imports the solution, plays the asked calls, writes down the answers.

Nothing here is trusted by anybody: the process shares its interpreter with the solution, which may do to it what it
likes. It holds no expected value and decides nothing; a solution that forges its output still has to write the right
answers there. Self-contained (standard library, Python 3.8+) because it is copied into the sandbox as it stands.

Values travel as JSON with tags for what JSON does not have: {"t": "tuple", "v": [...]}; see `encode`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

MAX_DEPTH = 100


class NotPlain(ValueError):
    """A value that is not plain data."""


def encode(value: Any, depth: int = 0) -> Any:
    """Plain data as JSON; raises NotPlain for anything else."""
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deeply")
    if value is None or isinstance(value, (bool, str)):
        return value
    for kind, pack in PACKERS:
        if isinstance(value, kind):
            return pack(value, depth + 1)
    raise NotPlain("a value of type " + type(value).__name__)


def _items(values: Any, depth: int) -> list[Any]:
    return [encode(item, depth) for item in values]


PACKERS: Any = (
    (int, lambda value, depth: value if abs(value) < 2**53 else {"t": "int", "v": str(value)}),
    (float, lambda value, depth: value if math.isfinite(value) else {"t": "float", "v": repr(value)}),
    (complex, lambda value, depth: {"t": "complex", "v": _items((value.real, value.imag), depth)}),
    ((bytes, bytearray), lambda value, depth: {"t": "bytes", "v": list(value)}),
    (list, _items),
    (tuple, lambda value, depth: {"t": "tuple", "v": _items(value, depth)}),
    ((set, frozenset), lambda value, depth: {"t": "set", "v": _items(value, depth)}),
    (dict, lambda value, depth: {"t": "dict", "v": [_items(pair, depth) for pair in value.items()]}),
)
"""Kind of value -> how it is packed, in this order."""


def decode(data: Any, depth: int = 0) -> Any:
    """The value that `encode` was given; raises ValueError for what it cannot have written."""
    if depth > 2 * MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(data, list):
        return [decode(item, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    try:
        return _decode_tagged(data["t"], data["v"], depth)
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError("not an encoded value") from error


def _decode_tagged(tag: str, body: Any, depth: int) -> Any:
    if tag in ("int", "float"):
        return int(body) if tag == "int" else float(body)
    if tag == "bytes":
        return bytes(body)
    if tag == "dict":
        return {decode(k, depth + 1): decode(v, depth + 1) for k, v in body}
    items = [decode(item, depth + 1) for item in body]
    if tag == "complex":
        return complex(*items)
    return {"tuple": tuple, "set": set}[tag](items)


def play(module: Any, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers to the steps of one case; the objects that steps create live as long as the case."""
    objects: dict[str, Any] = {}
    answers = []
    for step in steps:
        try:
            root, _, attribute = step["target"].partition(".")
            target = objects[root] if root in objects else getattr(module, root)
            for name in filter(None, attribute.split(".")):
                target = getattr(target, name)
            args = decode(step["args"])
            value = target if step["op"] == "get" else target(*args, **decode(step["kwargs"]))
            if step.get("bind"):
                objects[step["bind"]] = value
                value = None
            answers.append({"returns": encode(value), "args_after": encode(args)})
        except NotPlain as error:
            answers.append({"odd": str(error)})
        except BaseException as error:  # noqa: BLE001 - SystemExit and all: how the solution ends is its answer
            answers.append({"raises": [kind.__name__ for kind in type(error).__mro__], "message": str(error)[:200]})
    return answers


def load(path: str) -> Any:
    """Import the solution from its file; its folder is importable too."""
    place = Path(path).resolve()
    sys.path.insert(0, str(place.parent))
    spec = importlib.util.spec_from_file_location(place.stem, place)
    if spec is None or spec.loader is None:
        raise ImportError("cannot import " + path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[place.stem] = module
    spec.loader.exec_module(module)
    return module


def main(solution: str, inputs: str, outputs: str) -> None:
    """Answer every case of the inputs file; the answers appear all at once or not at all."""
    cases = json.loads(Path(inputs).read_text("utf-8"))
    # Bytecode that lies around may be older than its source by less than a second, or planted: read sources only.
    sys.dont_write_bytecode, sys.pycache_prefix = True, outputs + ".cache"
    module = load(solution)
    answers = [play(module, steps) for steps in cases]
    part = Path(outputs + ".part")
    part.write_text(json.dumps(answers), "utf-8")
    part.replace(outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
