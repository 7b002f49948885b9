"""Command line of the slot server; see PROTOCOL.md for the life of a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from typing import Any

from . import cleanup, machine
from .faults import SlotError, TimedOut
from .images.layer_store import LayerStore, default_path
from .images.own_root import OwnImage, make_mask
from .serving.image_requests import ImageRequests
from .serving.peer import Connection
from .serving.service import Service, owner_gone
from .slots.layer_snapshots import SnapshotStore
from .slots.probe import Host, find_host
from .slots.slots import Slots

TTL_CHECK_S = 0.5


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="slot-server", description="Serve isolated slots; the token is the first line of stdin."
    )
    parser.add_argument("--listen", default="tcp:127.0.0.1:0", help="unix:/path or tcp:host:port")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--most-shells", type=int, default=512, help="shells that wait in leased slots")
    parser.add_argument("--rest-after-s", type=float, default=10.0, help="how long a shell waits without a command")
    parser.add_argument("--scratch", required=True)
    parser.add_argument("--min-isolation", default="plain", choices=("namespaces", "landlock", "uid", "plain"))
    parser.add_argument("--level", help="use this level only")
    parser.add_argument("--owner-ttl-s", type=float, help="end when no client was connected for so long")
    parser.add_argument("--host-id", default="")
    parser.add_argument("--image", help="the image this server runs in: specs that name it get its whole root")
    parser.add_argument("--image-config", help="env, workdir and user of that image, as JSON")
    parser.add_argument("--images", help="where layers of images are kept for all servers of this user")
    parser.add_argument("--images-max-gb", type=float, default=50.0, help="what those layers may take")
    parser.add_argument("--keep-out", action="append", default=[], help="a folder that no slot may see")
    parser.add_argument("--settle-s", type=float, default=0.0, help="keep back so long that a command was killed")
    parser.add_argument("--die-with-parent", action="store_true", help="end when stdin is closed")
    parser.add_argument("--cleanup", action="store_true", help="only remove what an earlier server left in --scratch")
    return parser.parse_args()


def main() -> None:
    """Run the server, or clean up after one; with `--machine`, start and stop servers for a pool elsewhere."""
    _reset_signals()
    if sys.argv[1:] in (["--machine"], ["--machine-and-servers"]):
        machine.serve(keep_servers=sys.argv[1] == "--machine")
    arguments = _arguments()
    os.makedirs(arguments.scratch, exist_ok=True)
    arguments.scratch = os.path.realpath(arguments.scratch)
    problems = cleanup.clean(arguments.scratch)
    if arguments.cleanup:
        sys.stderr.write("".join(f"{problem}\n" for problem in problems))
        sys.exit(1 if problems else 0)
    token = sys.stdin.readline().strip()
    if not token:
        _say({"error": "no token on stdin"})
        sys.exit(2)
    _raise_file_limit(arguments.slots)
    try:
        asyncio.run(_serve(arguments, token))
    except (SlotError, OSError) as error:
        _say({"error": str(error)})
        sys.exit(3)
    finally:
        cleanup.clean(arguments.scratch)


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _reset_signals() -> None:
    """What is ignored here stays ignored in every command, and a shell's `&` has interrupts ignored."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _raise_file_limit(slots: int) -> None:
    """Every slot needs a handful of descriptors here; root may have more than the limit it was given."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (max(hard, 4096 + 4 * slots), hard):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
            return


async def _serve(arguments: argparse.Namespace, token: str) -> None:
    host = await find_host(arguments.scratch, arguments.slots, arguments.min_isolation, arguments.level)
    host.builder.keep_out += arguments.keep_out
    slots = Slots(arguments.slots, host.builder, arguments.most_shells, arguments.rest_after_s)
    snapshots = SnapshotStore(host.builder.place, host.zygote, host.level)
    facts = {"host_id": arguments.host_id or os.uname().nodename, **host.facts()}
    store = LayerStore(arguments.images or default_path(), "user" if host.level.user_ns else "trusted")
    host.builder.keep_out.append(store.path)
    own = _own_image(arguments, host)
    images = ImageRequests(store, int(arguments.images_max_gb * 2**30), host.level, own)
    service = Service(token, slots, snapshots, facts=facts, scratch=arguments.scratch, images=images)
    service.settle_s = arguments.settle_s
    host.on_lost = service.stopping.set
    server, address = await _listen(arguments.listen, service)
    cleanup.write_record(arguments.scratch, [os.getpid(), host.zygote.process.pid])
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, service.stopping.set)
    if arguments.die_with_parent:
        _watch_stdin(loop, service)
    _say({"address": address, "pid": os.getpid(), "isolation": host.level.name, "level": host.level.label})
    await _until_stopped(service, arguments.owner_ttl_s)
    server.close()
    for connection in list(service.connections):
        connection.close()
    await asyncio.sleep(0)
    _stop(host, arguments.listen)


def _own_image(arguments: argparse.Namespace, host: Host) -> OwnImage | None:
    if arguments.image is None:
        return None
    mask = os.path.join(host.builder.place.layers, "own-root")
    if host.level.namespaces:
        make_mask(mask, host.builder.keep_out)
    config = json.loads(arguments.image_config) if arguments.image_config else None
    return OwnImage(arguments.image, config, mask, host.level)


def _stop(host: Host, listen: str) -> None:
    """Ending the zygote ends every slot with everything in it."""
    host.zygote.close()
    if listen.startswith("unix:"):
        with contextlib.suppress(OSError):
            os.unlink(listen[5:])


async def _until_stopped(service: Service, ttl_s: float | None) -> None:
    while not service.stopping.is_set() and not owner_gone(service, ttl_s):
        with contextlib.suppress(TimedOut):
            await asyncio.wait_for(service.stopping.wait(), min(TTL_CHECK_S, ttl_s) if ttl_s else None)


def _watch_stdin(loop: asyncio.AbstractEventLoop, service: Service) -> None:
    def readable() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            service.stopping.set()

    loop.add_reader(0, readable)


async def _listen(address: str, service: Service) -> tuple[asyncio.AbstractServer, str]:
    loop = asyncio.get_running_loop()
    kind, _, rest = address.partition(":")
    if kind == "unix":
        with contextlib.suppress(OSError):
            os.unlink(rest)
        unix = await loop.create_unix_server(lambda: Connection(service), rest)
        os.chmod(rest, 0o600)
        return unix, address
    if kind != "tcp":
        raise SlotError("refused", f"cannot listen on {address!r}")
    name, _, port = rest.rpartition(":")
    server = await loop.create_server(lambda: Connection(service), name, int(port))
    return server, f"tcp:{name}:{server.sockets[0].getsockname()[1]}"
