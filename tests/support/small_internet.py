"""An internet of two network namespaces: in one the slot server with services of its own, in the other public hosts.

Addresses are ones that look public to everybody; nothing leaves the namespaces. As a program: the services of one side.
"""

from __future__ import annotations

import contextlib
import http.server
import ipaddress
import os
import shutil
import socketserver
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

SITE, OTHER, DNS, SITE6 = "93.184.216.34", "93.184.216.35", "93.184.216.53", "2606:2800:220:1::34"
HOST, HOST6, PRIVATE = "93.184.216.2", "2606:2800:220:1::2", "10.77.7.7"
"""Of the machine the slot server runs on: its public addresses, and one of its private network."""
NAMES = {
    "site.example": [[SITE]],
    "index.example": [[SITE]],
    "deep.down.site.example": [[SITE]],
    "other.example": [[OTHER]],
    "six.example": [[SITE6]],
    "loop.example": [["127.0.0.1"]],
    "loop6.example": [["::1"]],
    "mapped.example": [["::ffff:127.0.0.1"]],
    "private.example": [[PRIVATE]],
    "self.example": [[HOST]],
    "self6.example": [[HOST6]],
    "metadata.example": [["169.254.169.254"]],
    "zero.example": [["0.0.0.0"]],
    "mixed.example": [["127.0.0.1", SITE, PRIVATE]],
    "rebind.example": [[SITE], ["127.0.0.1"]],
}
"""Name -> the answers of the name server, one after the other in turn."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def missing() -> str:
    """Why there can be none here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces with addresses need root"
    absent = [name for name in ("ip", "openssl", "setpriv") if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


class SmallInternet:
    """Its namespaces, services and files."""

    def __init__(self) -> None:
        self.tag = f"hrlnet{os.getpid() % 100000}"
        self.here, self.there = f"{self.tag}h", f"{self.tag}t"
        self.folder = Path(tempfile.mkdtemp(prefix="hrl-net-"))
        self.folder.chmod(0o755)
        self.www = self.folder / "www"
        self.www.mkdir()
        self._services: list[subprocess.Popen[bytes]] = []

    def prefix(self, user: int | None = None) -> list[str]:
        """What a command is put after to run on the machine of the slot server, with that network's name server."""
        script = 'mount --bind "$1" /etc/resolv.conf; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
        files = [str(self.folder / "resolv.conf"), str(self.folder / "hosts")]
        become = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return ["ip", "netns", "exec", self.here, "sh", "-ec", script, "sh", *files, *become]

    def start(self) -> None:
        (self.folder / "resolv.conf").write_text(f"nameserver {DNS}\noptions timeout:1 attempts:1\n")
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n")
        self._make_certificates()
        for space in (self.here, self.there):
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", self.here, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", self.there)
        for space, addresses in ((self.here, [HOST, HOST6]), (self.there, [SITE, OTHER, DNS, SITE6])):
            for address in addresses:
                size, duplicates = ("64", ["nodad"]) if ":" in address else ("24", [])
                ip("-n", space, "addr", "add", f"{address}/{size}", "dev", "eth0", *duplicates)
            ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", self.here, "addr", "add", f"{PRIVATE}/32", "dev", "lo")
        for space, role in ((self.here, "inside"), (self.there, "public")):
            command = ["ip", "netns", "exec", space, sys.executable, __file__, role, str(self.folder)]
            service = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._services.append(service)
            assert service.stdout is not None
            assert service.stdout.readline() == b"ready\n"

    def _make_certificates(self) -> None:
        names = ",".join(f"DNS:{name}" for name in NAMES)
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        words += ["-nodes", "-days", "2", "-subj", "/CN=small internet"]
        words += ["-keyout", str(self.folder / "key.pem"), "-out", str(self.folder / "cert.pem")]
        subprocess.run([*words, "-addext", f"subjectAltName={names}"], check=True, capture_output=True)

    def asked(self) -> list[str]:
        """What the services were asked for: side, host header, path."""
        return (self.folder / "asked").read_text().splitlines() if (self.folder / "asked").exists() else []

    def close(self) -> None:
        for service in self._services:
            service.kill()
            service.wait()
        for space in (self.here, self.there):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def small_internet() -> Iterator[SmallInternet]:
    net = SmallInternet()
    try:
        net.start()
        yield net
    finally:
        net.close()


def serve(role: str, folder: Path) -> None:
    """The services of one side, until stdin closes."""

    class Pages(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def __init__(self, *arguments, **more):
            super().__init__(*arguments, directory=str(folder / "www"), **more)

        def log_message(self, *_):
            with (folder / "asked").open("a") as log:
                log.write(f"{role} {self.headers.get('Host')} {self.path}\n")

        def do_GET(self):
            if role == "inside":
                return self.answer(200, b"INSIDE\n")
            if self.path.startswith("/to?"):
                return self.answer(302, b"", ("Location", self.path[4:]))
            if self.path == "/":
                return self.answer(200, f"public {self.headers.get('Host')}\n".encode())
            return super().do_GET()

        def do_POST(self):
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.answer(200, body)

        def answer(self, code, body, *headers):
            self.send_response(code)
            for name, value in (*headers, ("Content-Length", str(len(body)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    class Server(http.server.ThreadingHTTPServer):
        address_family = 10  # AF_INET6, which takes IPv4 as well
        daemon_threads = True

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    for port in (80, 443, 8080):
        server = Server(("::", port), Pages)
        if port == 443:
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    if role == "public":
        names = socketserver.ThreadingUDPServer((DNS, 53), Names)
        threading.Thread(target=names.serve_forever, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


class Names(socketserver.BaseRequestHandler):
    """A name server for NAMES: A and AAAA."""

    turns: ClassVar[dict[tuple[str, int], int]] = {}

    def handle(self) -> None:
        query, sock = self.request
        labels, position = [], 12
        while size := query[position]:
            labels.append(query[position + 1 : position + 1 + size].decode().lower())
            position += 1 + size
        question = query[12 : position + 5]
        kind = struct.unpack("!H", query[position + 1 : position + 3])[0]
        name = ".".join(labels)
        answers = NAMES.get(name)
        packed = []
        if answers:
            turn = self.turns.get((name, kind), 0)
            self.turns[name, kind] = turn + 1
            chosen = [ipaddress.ip_address(text) for text in answers[turn % len(answers)]]
            packed = [address.packed for address in chosen if kind == (1 if address.version == 4 else 28)]
        head = query[:2] + struct.pack("!HHHHH", 0x8180 if answers else 0x8183, 1, len(packed), 0, 0)
        records = b"".join(b"\xc0\x0c" + struct.pack("!HHIH", kind, 1, 0, len(p)) + p for p in packed)
        sock.sendto(head + question + records, self.client_address)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
