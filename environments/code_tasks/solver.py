"""Runs inside the sandbox: asks the solution one question after the other and signs its answers.

Two processes. The solution runs in the child, which may do what it likes: what it says is its answer. The parent has
the questions, the answers given so far and the key, and gives the child one question at a time: no answer can depend on
a later question, be changed afterwards, or come from anybody but the solution while it was asked. Nobody here has an
expected value or decides anything. Self-contained (standard library, Python 3.8+): it is passed to `python -c`.

Values travel as JSON with tags for what JSON does not have: {"t": "tuple", "v": [...]}; see `encode`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.util
import json
import math
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

MAX_DEPTH = 100
MAX_ANSWER_BYTES = 4_000_000
MAX_ALIKE = 100
"""Members of a set that may have one hash: with many of them it would take time that grows with their square."""
PR_SET_DUMPABLE = 4


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
        pairs = [(decode(k, depth + 1), decode(v, depth + 1)) for k, v in body]
        _check_hashes([key for key, _ in pairs])
        return dict(pairs)
    items = [decode(item, depth + 1) for item in body]
    if tag == "complex":
        return complex(*items)
    if tag == "set":
        _check_hashes(items)
    return {"tuple": tuple, "set": set}[tag](items)


def _check_hashes(members: Any) -> None:
    if max(Counter(map(hash, members)).values(), default=0) > MAX_ALIKE:
        raise ValueError("members made to have one hash")


def play(module: Any, objects: dict[str, Any], step: dict[str, Any]) -> dict[str, Any]:
    """The answer to one step; `objects` are those that earlier steps of the case created."""
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
        return {"returns": encode(value), "args_after": encode(args)}
    except NotPlain as error:
        return {"odd": str(error)}
    except BaseException as error:  # noqa: BLE001 - SystemExit and all: how the solution ends is its answer
        return {"raises": [kind.__name__ for kind in type(error).__mro__], "message": str(error)[:200]}


def load(path: str) -> Any:
    """Import the solution from its file; its folder is importable too."""
    # Bytecode that lies around may be older than its source by less than a second, or planted: read sources only.
    sys.dont_write_bytecode, sys.pycache_prefix = True, os.devnull
    place = Path(path).resolve()
    sys.path.insert(0, str(place.parent))
    spec = importlib.util.spec_from_file_location(place.stem, place)
    if spec is None or spec.loader is None:
        raise ImportError("cannot import " + path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[place.stem] = module
    spec.loader.exec_module(module)
    return module


def answer(solution: str, questions: Any, answers: Any) -> None:
    """The child: one line for each line, until there are no more."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    try:
        module = load(solution)
    except BaseException as error:  # noqa: BLE001 - as in play()
        answers.write(json.dumps({"broken": f"{type(error).__name__}: {error}"[:200]}).encode() + b"\n")
        answers.flush()
        return
    objects: dict[str, Any] = {}
    for line in questions:
        step = json.loads(line)
        if step.pop("first"):
            objects.clear()
        answers.write(json.dumps(play(module, objects, step)).encode() + b"\n")
        answers.flush()


def ask(cases: list[list[dict[str, Any]]], questions: Any, answers: Any) -> list[list[Any]]:
    """The parent: what the child says to each step of each case; raises EOFError when it says nothing."""
    given: list[list[Any]] = []
    left = MAX_ANSWER_BYTES
    for steps in cases:
        given.append([])
        for number, step in enumerate(steps):
            with contextlib.suppress(BrokenPipeError):  # then there is no answer either
                questions.write(json.dumps({**step, "first": number == 0}).encode() + b"\n")
                questions.flush()
            line = answers.readline(left + 1)
            left -= len(line)
            if not line:
                raise EOFError
            if left < 0:
                raise ValueError(f"more than {MAX_ANSWER_BYTES} bytes")
            said = json.loads(line)
            if isinstance(said, dict) and "broken" in said:
                raise ValueError(str(said["broken"])[:200])
            given[-1].append(said)
    return given


def hide_process() -> None:
    """Memory and descriptors of this process stay closed to others of the same user."""
    with contextlib.suppress(ImportError, OSError):  # a Python without ctypes: then the child could read them
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def main(solution: str) -> None:
    """Request on stdin; the signature and the answers on stdout, or a sentence and exit code 1."""
    to_child, to_parent = os.pipe(), os.pipe()
    hide_process()
    child = os.fork()  # before the request is read, so that nothing of it is in the child's memory
    if child == 0:
        os.close(to_child[1])
        os.close(to_parent[0])
        with os.fdopen(to_child[0], "rb") as questions, os.fdopen(to_parent[1], "wb") as answers:
            answer(solution, questions, answers)
        os._exit(0)
    os.close(to_child[0])
    os.close(to_parent[1])
    request = json.loads(sys.stdin.buffer.read())
    try:
        with os.fdopen(to_child[1], "wb", 0) as questions, os.fdopen(to_parent[0], "rb") as answers:
            body = json.dumps(ask(request["cases"], questions, answers))
    except (ValueError, RecursionError) as error:
        sys.exit(str(error))
    except EOFError:
        os.kill(child, signal.SIGKILL)  # when it has ended by itself, this changes nothing
        status = os.waitpid(child, 0)[1]
        sys.exit(f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}")
    sys.stdout.write(hmac.new(request["key"].encode(), body.encode(), hashlib.sha256).hexdigest() + "\n" + body)


if __name__ == "__main__":
    main(sys.argv[1])
