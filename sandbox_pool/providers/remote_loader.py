"""First process of a remote host: gets the slot server from the pool, runs it, and cleans up after it.

It travels as text (`python3 -c`), so it stands alone and runs on Python 3.9. Its settings hold only
hashes: of the token, so that reading a job is not enough to use the host, and of the server, so that only that program
is ever run.

    client: load <token>            loader: need | have
    client: <size>, the program     loader: the server's first line (its address, or what went wrong)

When the server ends, for whatever reason, what it left is removed. When this process is killed, the server ends itself.
When no pool connects in time, this process ends.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

RECEIVE_S = 20.0
STOP_S = 20.0
LIMIT = 64 << 20
NOT_OF_IMAGE = ("HRL_", "NOMAD_", "MODAL_", "VAULT_", "CONSUL_")
OF_ENGINE = {"HOSTNAME": None, "HOME": "/root", "TERM": None, "PWD": None, "OLDPWD": None, "SHLVL": None, "_": None}
"""What engines add to an image's ENV; None: whatever it is."""


def listen(bind: str) -> tuple[socket.socket, str]:
    """A socket that listens at `unix:/path`, or at an IP address and HRL_PORT, and the server's word for it."""
    if bind.startswith("unix:"):
        path = Path(bind[5:])
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
        return listener, bind
    port = int(os.environ["HRL_PORT"])
    return socket.create_server((bind, port)), f"tcp:{bind}:{port}"


def accept(listener: socket.socket, deadline: float) -> tuple[socket.socket, str]:
    """The first peer that sends the token."""
    wanted = os.environ["HRL_TOKEN_SHA256"]
    while time.monotonic() < deadline:
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            peer, _ = listener.accept()
            peer.settimeout(RECEIVE_S)
            words = read_line(peer, b"load ").split()
            if len(words) == 2 and words[0] == "load":
                digest = hashlib.sha256(words[1].encode()).hexdigest()
                if hmac.compare_digest(digest, wanted):
                    return peer, words[1]
            peer.close()
        except OSError:
            continue
    sys.exit("no pool connected to this host in time")


def read_line(peer: socket.socket, begins: bytes = b"") -> str:
    """One short line, read byte by byte so that nothing behind it is taken; cut short when it begins otherwise."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 200 and line[: len(begins)] == begins[: len(line)]:
        data = peer.recv(1)
        if not data:
            break
        line += data
    return line.decode("ascii", "replace").strip()


def receive(peer: socket.socket, path: Path) -> None:
    """Receive the program; refuse it unless its hash is the announced one."""
    peer.sendall(b"need\n")
    left = int(read_line(peer))
    if not 0 < left <= LIMIT:
        sys.exit("a program of that size is not accepted")
    data = bytearray()
    while len(data) < left:
        chunk = peer.recv(min(1 << 20, left - len(data)))
        if not chunk:
            sys.exit("the connection was cut while the program was sent")
        data += chunk
    if hashlib.sha256(data).hexdigest() != os.environ["HRL_SERVER_SHA256"]:
        sys.exit("the program that was sent is not the one that was announced")
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(data)


def run(command: list[str], token: str, peer: socket.socket) -> int:
    """The server until it ends. Its stdin stays open as long as this process lives; it ends itself when that closes."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
    server = subprocess.Popen(
        [*command, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd="/"
    )
    assert server.stdin is not None
    assert server.stdout is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: server.terminate())
    try:
        server.stdin.write(token.encode() + b"\n")
        server.stdin.flush()
    except OSError:
        pass  # it ended at once: its message is passed on below
    line = server.stdout.readline() or json.dumps({"error": "the server ended without a message"}).encode() + b"\n"
    sys.stdout.write(line.decode("utf-8", "replace"))
    sys.stdout.flush()
    try:
        peer.sendall(line)
        peer.close()
    except OSError:
        pass  # the pool is gone: the server ends after its `--owner-ttl-s`
    return server.wait()


def image_config() -> dict[str, object]:
    """ENV and WORKDIR of the image this process was started in, without what the scheduler and the engine added."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(NOT_OF_IMAGE) and (name not in OF_ENGINE or OF_ENGINE[name] not in (None, value))
    }
    user = f"{os.getuid()}:{os.getgid()}" if os.getuid() else ""
    return {"env": env, "workdir": str(Path.cwd()), "user": user}


def main() -> None:
    """Receive and run one slot server, then remove what it left."""
    scratch = Path(os.environ["HRL_SCRATCH"])
    scratch.mkdir(mode=0o711, parents=True, exist_ok=True)
    if scratch.is_symlink() or scratch.stat().st_uid != os.geteuid() or scratch.stat().st_mode & 0o022:
        sys.exit(f"another user could change what is in {scratch}")
    listener, address = listen(os.environ["HRL_BIND"])
    placed = os.environ.get("HRL_SERVER_PATH")
    path = Path(placed or scratch / "server.py")
    peer, token = accept(listener, time.monotonic() + float(os.environ["HRL_LOAD_S"]))
    listener.close()
    if placed and path.exists():  # put there by whoever runs the nodes
        peer.sendall(b"have\n")
    else:
        receive(peer, path)
    command = [sys.executable, str(path), "--scratch", str(scratch / "s"), "--keep-out", str(scratch)]
    if "--image" in sys.argv and "--image-config" not in sys.argv and "HRL_SECRETS" not in os.environ:
        command += ["--image-config", json.dumps(image_config())]
    code = -1
    try:
        code = run([*command, "--listen", address, "--die-with-parent"], token, peer)
    finally:
        if code != 0:  # after a proper end the server has cleaned up itself
            subprocess.run([*command, "--cleanup"], stdin=subprocess.DEVNULL, timeout=STOP_S, check=False)
        shutil.rmtree(scratch, ignore_errors=True)
    # Negative: killed by a signal. SIGTERM is a proper end.
    sys.exit(0 if code in (0, -signal.SIGTERM) else 1)


if __name__ == "__main__":
    main()
