"""`hermes-rl view`: a rollouts.jsonl as one self-contained HTML page, or served while the run goes on."""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.errors import UsageError, at_least

if TYPE_CHECKING:
    from environments.atropos.advantages import Baseline

EXAMPLE = "hermes-rl view runs/demo/rollouts.jsonl --open"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="a rollouts.jsonl, or the folder of a run")
    parser.add_argument(
        "--output", metavar="HTML", type=Path, help="where to write (default: report.html, or rollouts.html by learn's)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument(
        "--max-chars",
        type=at_least(100),
        default=20_000,
        metavar="N",
        help="cut longer texts in the middle (default: 20000)",
    )
    parser.add_argument("--no-tokens", action="store_true", help="leave tokens out: a smaller page")
    parser.add_argument(
        "--differences", metavar="JSON", type=Path, help="draw what `verify --against URL --differences JSON` found"
    )
    parser.add_argument("--live", action="store_true", help="serve the page, with what comes while the run goes on")
    parser.add_argument("--host", default="127.0.0.1", help="with --live: where to listen (default: this machine only)")
    parser.add_argument("--port", type=at_least(0), default=0, help="with --live: the port (default: any free one)")


def run(args: argparse.Namespace) -> int:
    """Write the page and print where it is; with --live serve it until interrupted."""
    if args.live:
        return serve_live(args)
    from environments.runs.report import build_report
    from environments.runs.report.html_page import UnreadableRun, find_rollouts, read_rollouts
    from environments.runs.store import write_whole

    source = find_rollouts(args.file)
    output: Path = args.output or source.with_name(_page_name(source))
    if not output.parent.is_dir():
        raise UsageError(f"cannot write {output}: there is no folder {output.parent}")
    try:
        page = build_report(
            read_rollouts(source),
            title=str(source),
            max_chars=args.max_chars,
            with_tokens=not args.no_tokens,
            baseline=baseline_of(source.parent),
            differences=None if args.differences is None else read_differences(args.differences),
        )
    except UnreadableRun as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror or error}") from error
    write_whole(output, page.encode())
    print(output)
    if args.open:
        _open(output.resolve().as_uri())
    return 0


def _page_name(source: Path) -> str:
    """report.html, unless that is the report of `learn`."""
    return "rollouts.html" if source.with_name("metrics.jsonl").exists() else "report.html"


def _open(address: str) -> None:
    import webbrowser

    webbrowser.open(address)


def baseline_of(folder: Path) -> Baseline:
    """How the run that wrote this folder computes advantages."""
    import yaml

    for name in ("config.json", "config.yaml"):
        if (folder / name).is_file():
            try:
                config = yaml.safe_load((folder / name).read_bytes())
            except yaml.YAMLError as error:
                raise UsageError(f"{folder / name} is damaged: {' '.join(str(error).split())}") from error
            if isinstance(config, dict) and (config.get("env") or {}).get("advantages") == "mean":
                return "mean"
    return "normalized"


def read_differences(path: Path) -> dict[str, list[Any]]:
    """What `verify --against` wrote, by rollout."""
    import orjson

    found: defaultdict[str, list[Any]] = defaultdict(list)
    try:
        data = orjson.loads(path.read_bytes())
        for entry in data["differences"]:
            beyond = abs(entry["stored"] - entry["again"]) > data["tolerance"]
            place = [entry[key] for key in ("segment", "position", "stored", "again")]
            found[entry["rollout_id"]].append([*place, beyond])
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} was not written by `verify --against URL --differences FILE`") from error
    return found


def serve_live(args: argparse.Namespace) -> int:
    """Serve the page until a signal."""
    for flag in ("output", "differences"):
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag} belongs to a page that is written: leave it out with --live")
    from agent_loop import own_process
    from environments.atropos.stops import Stop
    from environments.runs.live import LiveRun, LiveServer, open_run
    from environments.runs.report.html_page import find_rollouts

    folder = find_rollouts(args.file).parent
    run = open_run(LiveRun(args.file, max_chars=args.max_chars, baseline=baseline_of(folder)))

    async def serve() -> int:
        stop = Stop()
        with stop.on_signals():
            try:
                async with LiveServer(run).serving(args.host, args.port) as address:
                    print(address, flush=True)
                    if args.open:
                        _open(address)
                    await stop.draining.wait()
            except OSError as error:
                raise UsageError(f"cannot listen on {args.host}:{args.port}: {error.strerror or error}") from error
        return 0

    return own_process.run(serve())
