"""An authority of our own and a certificate for 127.0.0.1, so that tunnels are real TLS that a client can verify."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30")


def make(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """The file of the authority (what SSL_CERT_FILE names), and the servers' side."""
    authority, authority_key = folder / "ca.pem", folder / "ca.key"
    certificate, key = folder / "tunnel.pem", folder / "tunnel.key"
    _openssl("-subj", "/CN=Modal emulator CA", "-keyout", authority_key, "-out", authority,
             "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
    _openssl("-subj", "/CN=localhost", "-keyout", key, "-out", certificate, "-CA", authority, "-CAkey", authority_key,
             "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE",
             "-addext", "keyUsage=critical,digitalSignature")  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return authority, context


def _openssl(*options: str | Path) -> None:
    subprocess.run(["openssl", "req", "-x509", *NEW_KEY, *map(str, options)], check=True, capture_output=True)
