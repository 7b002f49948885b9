"""Engines on other machines: over TLS and over ssh, as the docker command reaches them; all of them real."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from sandbox_pool.errors import PlaceUnreachable
from sandbox_pool.journal.journal import Journal
from sandbox_pool.providers.base import ProviderContext, load_provider
from support import container_engines
from support.cli_verb import run_verb
from support.containers import Unavailable
from support.pool_clients import busy_client, kill
from support.pool_leftovers import processes
from support.pool_wait import eventually
from support.ssh_machines import MISSING, SSHD, Keys, LoopbackMachine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def folder():
    # Not tmp_path: sockets need a short path.
    made = Path(tempfile.mkdtemp(prefix="hrl-r-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def make_config(tmp_path):
    def make(engine, options=None, **settings):
        named = {**container_engines.OPTIONS, **(options or {})}
        return PoolConfig(
            provider=engine.kind,
            provider_options=named,
            state_dir=tmp_path / "state",
            **{"slots_per_host": 2, "max_hosts": 1, "start_attempts": 1, **settings},
        )

    return make


@pytest.fixture
def machine(folder, monkeypatch):
    """An sshd on loopback, and a user whose `ssh` knows it."""
    if SSHD is None:
        pytest.skip(MISSING)
    keys = Keys(folder / "keys")
    made = LoopbackMachine(keys, "engines")
    (folder / "bin").mkdir()
    # OpenSSH reads the config of the passwd file's home, which a test must not write to.
    program = f'#!/bin/sh\nexec {shutil.which("ssh")} -F {keys.config} "$@"\n'
    (folder / "bin/ssh").write_text(program)
    (folder / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    yield made
    made.close()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """A folder as DOCKER_CERT_PATH names it, and the files of the engine beside it."""
    made = tmp_path_factory.mktemp("tls")
    for name, extra in (
        ("ca", []),
        ("server", ["subjectAltName=IP:127.0.0.1"]),
        ("cert", ["extendedKeyUsage=clientAuth"]),
    ):
        key = "key.pem" if name == "cert" else f"{name}-key.pem"
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        words += ["-keyout", made / key, "-out", made / f"{name}.pem"]
        if name != "ca":
            words += ["-CA", made / "ca.pem", "-CAkey", made / "ca-key.pem"]
            words += [word for each in ["basicConstraints=critical,CA:FALSE", *extra] for word in ("-addext", each)]
        subprocess.run(words, check=True, capture_output=True)
    return made


@pytest.fixture(scope="session")
def tls(certificates):
    """A docker engine that lets in who has a certificate; the address of its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    files = {"--tlscacert": "ca.pem", "--tlscert": "server.pem", "--tlskey": "server-key.pem"}
    flags = [f"{flag}={certificates / name}" for flag, name in files.items()]
    try:
        with container_engines.docker("--tlsverify", *flags, "-H", address) as engine:
            yield engine, address
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def no_variables(monkeypatch, tmp_path):
    """A user without contexts or settings."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "CONTAINER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def docker(*words):
    """The user's own command."""
    subprocess.run(["docker", *words], check=True, capture_output=True)


async def use(config):
    """One lease, with more bytes than any buffer holds, both ways."""
    async with SlotPool.from_config(config) as pool, pool.lease("t") as box:
        data = os.urandom(1_000_000)
        await box.write_file("f", data)
        assert await box.read_file("f") == data
        assert (await box.exec("echo $((6 * 7))")).output == "42\n"


@pytest.mark.parametrize("said_by", ["variables", "options", "context"])
async def test_an_engine_behind_tls_gives_slots(make_config, tls, certificates, no_variables, said_by):
    engine, address = tls
    options = {}
    if said_by == "variables":
        no_variables.setenv("DOCKER_HOST", address)
        no_variables.setenv("DOCKER_TLS_VERIFY", "1")
        no_variables.setenv("DOCKER_CERT_PATH", str(certificates))
    elif said_by == "options":
        options = {"host": address, "cert_path": str(certificates)}
    else:
        files = ",".join(f"{name}={certificates / name}.pem" for name in ("ca", "cert", "key"))
        docker("context", "create", "far", "--docker", f"host={address},{files}")
        docker("context", "use", "far")
    await use(make_config(engine, options))
    assert (engine.containers(), engine.volumes()) == ([], [])


async def test_without_the_certificate_the_reason_is_told(make_config, tls, certificates, no_variables, tmp_path):
    engine, address = tls
    (tmp_path / "ca.pem").write_bytes((certificates / "ca.pem").read_bytes())
    for options, reason in (
        ({"host": address}, "HTTPS"),
        ({"host": address, "cert_path": str(tmp_path)}, r"there is no .*cert\.pem"),
        ({"host": address.replace("tcp", "https")}, "(?i)certificate"),
    ):
        config = make_config(engine, options)
        provider = load_provider("docker", ProviderContext.of(config, "machine_boot_ns_1_1"), config.provider_options)
        with pytest.raises(PlaceUnreachable, match=reason):
            await provider.start("hrl-x", SandboxSpec())
        await provider.close()


def test_gc_without_the_variables_of_the_killed_client_looks_at_its_engine(
    make_config, tls, certificates, no_variables, tmp_path
):
    engine, address = tls
    no_variables.setenv("DOCKER_HOST", address)
    no_variables.setenv("DOCKER_TLS_VERIFY", "1")
    no_variables.setenv("DOCKER_CERT_PATH", str(certificates))
    config = make_config(engine, owner_ttl_s=1000)
    client = busy_client(config, tmp_path, 2)
    assert len(engine.containers()) == 1
    kill(client)
    for name in ("DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        no_variables.delenv(name)
    no_variables.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    assert run_verb("pool", "gc", "--state-dir", str(config.state_dir)) == 0
    assert (engine.containers(), engine.volumes()) == ([], [])
    journal = Journal(config.state_dir)
    assert journal.hosts() == []
    journal.close()


@pytest.mark.parametrize("said_by", ["options", "context"])
@pytest.mark.parametrize("kind", ["docker", "podman"])
async def test_an_engine_behind_ssh_gives_slots_and_no_ssh_stays(
    make_config, engines, machine, no_variables, kind, said_by
):
    engine = engines(kind)
    address = f"ssh://engines{engine.host.removeprefix('unix://')}"
    options = {"host": address}
    if said_by == "context":
        if kind == "podman":
            pytest.skip("contexts are docker's")
        docker("context", "create", "far", "--docker", f"host={address}")
        options = {"context": "far"}
    await use(make_config(engine, options))
    await eventually(lambda: not processes(machine.keys.config, []))
    assert (engine.containers(), engine.volumes()) == ([], [])


async def test_what_ssh_or_the_command_there_says_is_the_reason(make_config, engines, machine, no_variables):
    engine = engines("docker")
    for host, reason in (
        (f"ssh://127.0.0.1:{machine.port}/none", "Host key verification failed"),
        ("ssh://engines/no/such/socket", "no/such/socket"),
    ):
        config = make_config(engine, {"host": host})
        provider = load_provider("docker", ProviderContext.of(config, "machine_boot_ns_1_1"), config.provider_options)
        with pytest.raises(PlaceUnreachable, match=reason):
            await provider.start("hrl-x", SandboxSpec())
        await provider.close()
    await eventually(lambda: not processes(machine.keys.config, []))
    assert json.loads(engine.run("ps", "--all", "--format", "json") or "[]") == []
