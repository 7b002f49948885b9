"""`hermes-rl pool`: what sandboxes there are, what was left behind, and whether a provider keeps its promises."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

import sandbox_pool
from environments.consoles import new_console
from environments.errors import UsageError, at_least
from sandbox_pool import PoolConfig, SandboxError, SandboxSpec, SlotPool
from sandbox_pool.config import ImageSettings
from sandbox_pool.errors import did_you_mean, first_invalid
from sandbox_pool.images.image_source import check_name, is_folder
from sandbox_pool.journal.gc import Liveness, collect_orphans, default_place
from sandbox_pool.journal.journal import Journal, set_damaged_aside
from sandbox_pool.journal.owner import this_process
from sandbox_pool.pool.kept_snapshots import KeptSnapshots
from sandbox_pool.providers.base import HasJob, ProviderContext, load_provider, provider_names
from sandbox_pool.terminal_env import pool_fields, terminal_settings

if TYPE_CHECKING:
    from sandbox_pool.conformance import Check, CheckResult
    from sandbox_pool.server.images.layer_store import LayerStore

IMAGES = Path(sandbox_pool.__file__).parent / "images"
EXAMPLE = "hermes-rl pool bench --slots 16 --json"

PROMISES = {"exec_p50": 1.0, "exec_p99": 3.0, "reset_p50": 4.0, "cycle_p50": 8.0}
"""Ratios to the control that must not be exceeded; throughput must reach 0.7 of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    status = actions.add_parser("status", help="hosts and leases of every process of this user")
    gc = actions.add_parser("gc", help="remove what dead processes left behind")
    gc.add_argument(
        "--provider",
        action="append",
        default=[],
        help="also ask this provider for leftovers (local always is; default: TERMINAL_ENV)",
    )
    check = actions.add_parser("check", help="run the conformance suite against a provider")
    check.add_argument("--only", action="append", default=[], metavar="TEXT", help="only checks whose id contains TEXT")
    check.add_argument("--list", action="store_true", help="list the checks and their promises, run nothing")
    bench = actions.add_parser("bench", help="measure a provider and, in the same run, bare subprocesses")
    bench.add_argument("--rounds", type=at_least(1), default=100, help="samples per latency (default 100)")
    bench.add_argument(
        "--throughput-s", type=at_least(0.01, float), default=2.0, help="seconds per throughput sample (default 2)"
    )
    bench.add_argument(
        "--transfer-mb", type=at_least(1), default=100, help="size of the transferred file (default 100)"
    )
    bench.add_argument(
        "--rest-s", type=at_least(0, float), default=20.0, help="seconds before a slot left alone counts as idle"
    )
    gc.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of these providers")
    gc.add_argument("--rebuild", action="store_true", help="set a damaged journal aside and begin a new one first")
    gc.add_argument("--scratch-dir", help="also look for local leftovers here")
    gc.add_argument(
        "--prepared", action="store_true", help="also remove what `prepare` made and env.prepare_cache_mb kept"
    )
    bench.add_argument(
        "--many", type=at_least(0), default=0, metavar="N", help="also lease N slots of one host at once, e.g. 500"
    )
    job = actions.add_parser("job", help="print the job that a provider's hosts are started from")
    _add_images(actions)
    check.add_argument("--image", help="run every check in slots of this image")
    check.add_argument("--user", help="who commands run as in the image (default: as it says)")
    bench.add_argument("--image", help="measure slots with this image beside slots without, and nothing else")
    for action in (check, bench, job):
        action.add_argument(
            "--provider", help="built-in name, entry point or module:Class (default: TERMINAL_ENV, else local)"
        )
        action.add_argument("--slots", type=at_least(1), default=16, help="slots of the host (default 16)")
        action.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of the provider")
        action.add_argument("--min-isolation", choices=("namespaces", "landlock", "uid", "plain"), default="plain")
        action.add_argument("--scratch-dir", help="where slots keep their layers")
    job.set_defaults(provider="nomad", slots=8, state_dir=None)
    for action in (status, gc, check, bench):
        action.add_argument("--json", action="store_true", help="machine-readable output")
        action.add_argument("--state-dir", help="where the journal is (default: the user's state directory)")


def _add_images(actions: Any) -> None:
    images = actions.add_parser("images", aliases=["image"], help="the image of containers; layers on this machine")
    verbs = images.add_subparsers(dest="images_action", metavar="VERB", required=True)
    build = verbs.add_parser("build", help="make the image of our sandboxes with docker or podman")
    build.add_argument("--provider", choices=("docker", "podman"), default="docker", help="whose command builds it")
    build.add_argument("--tag", default="hermes-sandbox:local", help="name of the image (default hermes-sandbox:local)")
    build.add_argument("--base", default="debian:bookworm-slim", help="a Debian to build on")
    build.add_argument("--network", help="network of the build, e.g. host")
    build.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="host or context of the engine"
    )
    pull = verbs.add_parser("pull", help="fetch images, so that no lease waits for them")
    pull.add_argument("image", nargs="+", help="as `image` in a spec: a registry's, oci:DIR, docker-archive:FILE, ...")
    pull.add_argument("--mirror", action="append", default=[], metavar="HOST=URL", help="ask this address first")
    listing = verbs.add_parser("list", help="every layer, the one used last at the end")
    gc = verbs.add_parser("gc", help="remove what killed processes left, and layers until the rest fits")
    for verb in (pull, gc):
        verb.add_argument(
            "--max-gb",
            type=at_least(0, float),
            default=ImageSettings().max_gb,
            help="what layers may take (default 50)",
        )
    for verb in (pull, listing, gc):
        verb.add_argument("--store-dir", help="where layers are kept (default: hermes-rl-images-<uid> on a local disk)")
        verb.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Do the action; each prints a table for people, or JSON for programs."""
    actions = {
        "status": status,
        "gc": gc,
        "check": check,
        "bench": bench,
        "job": job,
        "images": images,
        "image": images,
    }
    return actions[args.action](args)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def _state_dir(args: argparse.Namespace) -> Path:
    return PoolConfig(state_dir=args.state_dir).resolved_state_dir()


def status(args: argparse.Namespace) -> int:
    """Hosts and leases on record, and whether their owners live."""
    journal = Journal(_state_dir(args))
    live, owners = Liveness(journal.owners()), journal.owners()
    hosts, leases = journal.hosts(), journal.leases()
    journal.close()
    rows = []
    for host in hosts:
        owner = owners.get(host.owner)
        held = [lease for lease in leases if lease.host == host.name]
        rows.append(
            {
                "name": host.name,
                "provider": host.provider,
                "state": host.state,
                "isolation": host.isolation,
                "slots": host.slots,
                "leased": len(held),
                "tasks": [lease.task_id for lease in held],
                "age_s": round(time.time() - host.created_s, 1),
                "owner_pid": owner.owner.pid if owner else None,
                "owner_command": owner.command if owner else "",
                "owner_alive": live.alive(host.owner),
            }
        )
    if args.json:
        _print_json({"state_dir": str(_state_dir(args)), "hosts": rows})
    else:
        _status_table(rows)
    return 0


def _status_table(rows: list[dict[str, Any]]) -> None:
    console = new_console()
    if not rows:
        console.print("No hosts.")
        return
    table = Table(title="hosts", title_justify="left")
    for column in ("host", "provider", "state", "isolation", "leased", "age", "owner"):
        table.add_column(column, overflow="fold")
    for row in rows:
        owner = f"pid {row['owner_pid']}" if row["owner_alive"] else f"[red]pid {row['owner_pid']} is dead[/red]"
        leased = f"{row['leased']}/{row['slots']}"
        age = f"{row['age_s']:.0f} s"
        table.add_row(row["name"], row["provider"], row["state"], row["isolation"], leased, age, owner)
    console.print(table)
    if not all(row["owner_alive"] for row in rows):
        console.print("Hosts without a living owner are removed by `hermes-rl pool gc`.")


def gc(args: argparse.Namespace) -> int:
    """Remove leftovers; 1 when something could not be removed."""
    state_dir = _state_dir(args)
    if args.rebuild and (aside := set_damaged_aside(state_dir)):
        print(
            f"the damaged journal is now {aside}; name providers and scratch spaces that it knew with flags",
            file=sys.stderr,
        )
    journal = Journal(state_dir)
    me = this_process()
    try:
        for name in args.provider:
            if name not in provider_names() and ":" not in name:
                raise UsageError(
                    f"there is no provider {name!r}; {did_you_mean(name, provider_names())}, or give module:Class"
                )
        places = [default_place(name, options=_options(args)) for name in args.provider]
        if not args.provider and (variables := _from_variables(None)).get("provider", "local") != "local":
            options = {**variables.get("provider_options", {}), **_options(args)}
            places.append(default_place(variables["provider"], options=options))
        if args.scratch_dir:
            places.append(default_place("local", Path(args.scratch_dir)))
        report = asyncio.run(collect_orphans(journal, state_dir, me, places=places))
        journal.forget_owner(me.tag())
    finally:
        journal.close()
    prepared_mb = KeptSnapshots(state_dir, 0).trim() / 2**20 if args.prepared else 0.0
    if args.json:
        actions = [vars(action) for action in report.actions]
        _print_json({"left": report.left, "actions": actions, "prepared_mb": round(prepared_mb, 1)})
        return 1 if report.left else 0
    for action in report.actions:
        print(action.text())
    if args.prepared:
        print(f"{prepared_mb:.1f} MB of prepared items removed")
    removed = sum(action.done == "destroyed" for action in report.actions)
    print(f"{removed} removed, {report.left} left")
    return 1 if report.left else 0


def _options(args: argparse.Namespace) -> dict[str, str]:
    options: dict[str, str] = {}
    for text in args.option:
        key, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"--option {text!r} is not KEY=VALUE")
        options[key] = value
    return options


def _from_variables(provider: str | None) -> dict[str, Any]:
    """Provider, its options and its image as TERMINAL_* variables give them, unless a flag names another provider."""
    try:
        taken = [
            item
            for item in terminal_settings(os.environ, provider)
            if item.path[0] in ("provider", "provider_options") or item.path == ("spec", "image")
        ]
    except ValueError as error:
        raise UsageError(str(error)) from error
    if taken:
        print(f"from the environment: {', '.join(item.variable for item in taken)}", file=sys.stderr)
    return pool_fields(taken)


def _config(args: argparse.Namespace) -> PoolConfig:
    variables = _from_variables(args.provider)
    args.provider = args.provider or variables.get("provider", "local")
    fields: dict[str, Any] = {
        "provider": args.provider,
        "provider_options": {**variables.get("provider_options", {}), **_options(args)},
        "slots_per_host": args.slots,
        "max_hosts": 1,
        "min_isolation": args.min_isolation,
        "scratch_dir": args.scratch_dir,
        "state_dir": args.state_dir,
    }
    image = getattr(args, "image", None) or variables.get("spec", {}).get("image")
    try:
        if image is not None:
            check_name(image)
            fields["spec"] = SandboxSpec(image=image, user=getattr(args, "user", None))
        config = PoolConfig(**fields)
        load_provider(config.provider, ProviderContext.of(config, this_process().tag()), config.provider_options)
    except ValidationError as error:
        raise UsageError(first_invalid(error, PoolConfig)) from error
    except (ValueError, SandboxError) as error:
        raise UsageError(str(error)) from error
    return config


def check(args: argparse.Namespace) -> int:
    """Run the conformance suite; 1 when a promise was not kept."""
    from sandbox_pool.conformance import all_checks

    chosen = [check for check in all_checks() if not args.only or any(text in check.id for text in args.only)]
    if not chosen:
        raise UsageError(
            f"no check's id contains {' or '.join(map(repr, args.only))} (see `hermes-rl pool check --list`)"
        )
    if args.list:
        for item in chosen:
            print(f"{item.id:62} {item.promise}")
        return 0
    try:
        info, results = asyncio.run(_run_checks(_config(args), chosen, quiet=args.json))
    except SandboxError as error:
        raise UsageError(f"the provider {args.provider!r} could not be started: {error}") from error
    _show_checks(info, results, as_json=args.json)
    return 1 if any(result.verdict == "failed" for result in results) else 0


def _show_checks(info: dict[str, Any], results: list[CheckResult], *, as_json: bool) -> None:
    counts = {verdict: sum(r.verdict == verdict for r in results) for verdict in ("passed", "failed", "not promised")}
    if as_json:
        _print_json({**info, "counts": counts, "checks": [vars(result) for result in results]})
        return
    _check_table(results)
    print(f"{info['provider']} at {info['isolation']}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))


async def _run_checks(
    config: PoolConfig, chosen: list[Check], *, quiet: bool
) -> tuple[dict[str, Any], list[CheckResult]]:
    from sandbox_pool.conformance import run_checks
    from sandbox_pool.conformance.runner import make_context

    results = []
    async with SlotPool.from_config(config) as pool:
        context = await make_context(pool)
        with _progress(quiet) as progress:
            task = progress.add_task("checks", total=len(chosen))
            async for result in run_checks(chosen, context):
                results.append(result)
                progress.advance(task)
        context.close()
    order = {check.id: position for position, check in enumerate(chosen)}
    info = {
        "provider": config.provider,
        "isolation": context.info.isolation,
        "variant": context.info.variant,
        "missing": list(context.info.missing),
    }
    return info, sorted(results, key=lambda result: order[result.id])


def _check_table(results: list[CheckResult]) -> None:
    colours = {"passed": "green", "failed": "red", "not promised": "yellow"}
    table = Table()
    for column in ("check", "verdict", "promise"):
        table.add_column(column, overflow="fold")
    for result in results:
        promise = result.promise if result.verdict == "passed" else f"{result.promise}\n{result.detail}"
        verdict = "not promised here" if result.verdict == "not promised" else result.verdict
        table.add_row(result.id, f"[{colours[result.verdict]}]{verdict}[/]", promise)
    new_console().print(table)


def _progress(quiet: bool) -> Progress:
    """On a terminal a bar on stderr; nothing in a pipe."""
    console = new_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


def job(args: argparse.Namespace) -> int:
    """Print a provider's job as JSON, the form that its cluster takes."""
    config = _config(args)
    provider = load_provider(config.provider, ProviderContext.of(config, this_process().tag()), config.provider_options)
    if not isinstance(provider, HasJob):
        raise UsageError(f"hosts of the provider {args.provider!r} are not started from a job")
    try:
        _print_json({"Job": provider.job(config.spec)})
    except ValueError as error:
        raise UsageError(str(error)) from error
    return 0


def _build(args: argparse.Namespace) -> int:
    """Build the image with the engine's own command, which knows its builders, contexts and logins."""
    flags = {"host": "--url" if args.provider == "podman" else "--host", "context": "--context"}
    engine: list[str] = []
    for name, value in _options(args).items():
        if name not in flags:
            raise UsageError(f"--option {name!r} says nothing about a build; {did_you_mean(name, flags)}")
        engine += [flags[name], value]
    program = shutil.which(args.provider)
    if program is None:
        raise UsageError(f"there is no command {args.provider!r} here to build the image with")
    settings = ["--tag", args.tag, "--build-arg", f"BASE={args.base}"]
    if args.network:
        settings += ["--network", args.network]
    return subprocess.run([program, *engine, "build", *settings, str(IMAGES)], check=False).returncode and 1


def images(args: argparse.Namespace) -> int:
    """Build the image of containers; fetch, list or remove layers on this machine."""
    if args.images_action == "build":
        return _build(args)
    from sandbox_pool.server.images.layer_store import LayerStore, default_path

    store = LayerStore(args.store_dir or default_path(), "user")
    try:
        if args.images_action == "pull":
            return _pull(args, store)
        if args.images_action == "gc":
            return _collect_layers(args, store)
    except SandboxError as error:
        raise UsageError(str(error)) from error
    layers = store.listed()
    if args.json:
        _print_json({"store": store.path, "layers": [vars(layer) for layer in layers]})
        return 0
    for layer in layers:
        ago = f"{(time.time() - layer.used_s) / 3600:8.1f} h ago"
        print(f"{layer.diff_id}  {layer.bytes / 2**20:10.1f} MB  {ago}{'  in use' if layer.in_use else ''}")
    print(f"{len(layers)} layers, {sum(layer.bytes for layer in layers) / 2**20:.1f} MB in {store.path}")
    return 0


def _pull(args: argparse.Namespace, store: LayerStore) -> int:
    from sandbox_pool.images.supply import Images

    mirrors: dict[str, list[str]] = {}
    for text in args.mirror:
        host, separator, address = text.partition("=")
        if not separator or not address.startswith(("http://", "https://")):
            raise UsageError(f"--mirror {text!r} is not HOST=URL")
        mirrors.setdefault(host, []).append(address)
    for name in args.image:
        if is_folder(name):
            raise UsageError(f"{name!r} is a folder: it is used as it is, there is nothing to fetch")
        check_name(name)

    async def pull_all() -> list[dict[str, Any]]:
        source = Images(ImageSettings(mirrors=mirrors, max_gb=args.max_gb or ImageSettings().max_gb))
        done = []
        with Progress(console=new_console(stderr=True), transient=True, disable=args.json) as progress:
            tasks: dict[str, TaskID] = {}

            def show(digest: str, have: int, size: int) -> None:
                if digest not in tasks:
                    tasks[digest] = progress.add_task(digest[7:19], total=size or None)
                progress.update(tasks[digest], completed=have)

            source.registries.progress = show
            try:
                for name in args.image:
                    fetched = await source.pull(name, store)
                    image = await source.find(name)
                    done.append(
                        {"image": name, "digest": image.digest, "layers": len(image.layers), "new": len(fetched)}
                    )
            finally:
                await source.close()
        return done

    done = asyncio.run(pull_all())
    if args.json:
        _print_json({"store": store.path, "images": done})
    else:
        for row in done:
            print(f"{row['image']}: {row['layers']} layers, {row['new']} of them new, {row['digest'][:19]}")
    return 0


def _collect_layers(args: argparse.Namespace, store: LayerStore) -> int:
    from sandbox_pool.images.supply import collect_layers

    answer = asyncio.run(collect_layers(store, int(args.max_gb * 2**30)))
    if args.json:
        _print_json(answer)
    else:
        downloads = f"{answer['download_bytes'] / 2**20:.1f} MB of downloads"
        print(f"{len(answer['removed'])} layers, {len(answer['drafts'])} half unpacked ones and {downloads} removed")
    return 0


def _bench_image(args: argparse.Namespace) -> int:
    from environments.apps.bench.bench_images import PROMISES as WANTED
    from environments.apps.bench.bench_images import bench_image

    try:
        result = asyncio.run(bench_image(_config(args), args.rounds))
    except SandboxError as error:
        raise UsageError(f"the image {args.image!r} could not be measured: {error}") from error
    if args.json:
        _print_json(result)
        return 0
    for name, value in result.items():
        promise = WANTED.get(name)
        kept = "" if promise is None else f"  ({promise.text}: {'kept' if promise.kept(value) else 'not kept'})"
        print(f"{name:28} {value}{kept}")
    return 0


def bench(args: argparse.Namespace) -> int:
    """Measure the provider, and its controls in the same run."""
    if args.image is not None:
        return _bench_image(args)
    from environments.apps.bench.bench_pool import BenchPlan, run_bench, run_many

    plan = BenchPlan(args.slots, args.rounds, args.throughput_s, transfer_mb=args.transfer_mb, rest_s=args.rest_s)
    console = new_console(stderr=True)

    def say(text: str) -> None:
        console.print(f"measuring: {text}", style="dim")

    async def measure() -> dict[str, Any]:
        # One slot more than is measured: the snapshot's own lease stays while forks come and go.
        config = _config(args)
        async with SlotPool.from_config(config.model_copy(update={"slots_per_host": args.slots + 1})) as pool:
            result = await run_bench(pool, plan, say)
        if args.many:
            say(f"{args.many} slots at once")
            result["many"] = await run_many(config, args.many)
        return result

    try:
        result = asyncio.run(measure())
    except SandboxError as error:
        raise UsageError(f"the provider {args.provider!r} could not be measured: {error}") from error
    if args.json:
        _print_json(result)
    else:
        _bench_table(result)
    return 0


def _bench_table(result: dict[str, Any]) -> None:
    console = new_console()
    table = Table(title=f"{result['provider']} at {result['isolation']}, {result['slots']} slots", title_justify="left")
    for column in ("ms", "p50", "p95", "p99"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    for name, value in result.items():
        if isinstance(value, dict) and "p50" in value:
            table.add_row(name.removesuffix("_ms"), *(f"{value[q]:.2f}" for q in ("p50", "p95", "p99")))
    console.print(table)
    names = ("throughput_per_s", "control_throughput_per_s", "waiting_kb_per_slot", "idle_kb_per_slot")
    for name in (*names, "parallel_sleep_0_2_wall_s", "upload_mb_per_s", "download_mb_per_s", "transfer_exact"):
        console.print(f"{name:26} {result[name]}")
    if "many" in result:
        console.print("many at once               " + ", ".join(f"{k} {v}" for k, v in result["many"].items()))
    for name, ratio in result["ratios"].items():
        kept = ratio >= 0.7 if name == "throughput" else ratio <= PROMISES[name]
        wanted = ">= 0.7" if name == "throughput" else f"<= {PROMISES[name]:g}"
        console.print(f"{name:26} {ratio} x control ({wanted}: {'kept' if kept else 'not kept'})")
