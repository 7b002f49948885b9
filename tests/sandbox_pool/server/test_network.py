"""What programs in a slot can do through their slot's proxy: package managers, git and plain requests work by name."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox_pool.errors import SandboxError
from sandbox_pool.spec import NetworkRules, SandboxSpec
from support.slot_server import NOBODY, Server, running_server
from support.small_internet import SmallInternet, missing, small_internet

pytestmark = pytest.mark.asyncio(loop_scope="module")
PIP = next(iter(sorted(Path("/usr/share/python-wheels").glob("pip-*.whl"))), None)
SPEC = SandboxSpec(network=NetworkRules(allow=("index.example", "site.example:80"), prepare=("other.example",)))


@pytest.fixture(scope="module")
def net() -> Iterator[SmallInternet]:
    if missing():
        pytest.skip(missing())
    with small_internet() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[None, NOBODY], ids=["root", "rootless"])
async def server(request: pytest.FixtureRequest, net: SmallInternet) -> AsyncIterator[Server]:
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("no Python that an ordinary user may run")
    async with running_server(user=request.param, prefix=net.prefix(request.param), python=python) as running:
        if running.client.info.isolation != "namespaces":
            pytest.skip(running.client.info.isolation_reason)
        yield running


def make_index(www: Path) -> None:
    """A package index with one wheel."""
    folder = www / "simple" / "smallpackage"
    if folder.exists():
        return
    folder.mkdir(parents=True)
    info = "smallpackage-1.0.dist-info"
    with zipfile.ZipFile(folder / "smallpackage-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("smallpackage.py", "VALUE = 42\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: smallpackage\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text('<a href="smallpackage-1.0-py3-none-any.whl">smallpackage-1.0</a>')


@pytest.mark.skipif(PIP is None, reason="no pip that slots can see (python3-venv)")
async def test_pip_installs_from_an_index_by_name_and_from_no_other(server: Server, net: SmallInternet) -> None:
    make_index(net.www)
    async with server.lease(SPEC) as slot:
        await slot.write_file("ca.pem", (net.folder / "cert.pem").read_bytes())
        pip = f"PYTHONPATH={PIP} python3 -m pip install --no-cache-dir --disable-pip-version-check --cert ca.pem"
        indexes = "--index-url https://index.example/simple --extra-index-url https://other.example/simple"
        result = await slot.exec(f"{pip} -q --retries 0 --target there {indexes} smallpackage", timeout_s=120)
        assert result.exit_code == 0, result.output
        assert (
            await slot.exec("PYTHONPATH=there python3 -c 'import smallpackage as s; print(s.VALUE)'")
        ).output == "42\n"
        asked = {(entry.host, entry.port, entry.allowed) for entry in await slot.network_log()}
    assert asked == {("index.example", 443, True), ("other.example", 443, False)}


def make_repository(folder: Path) -> None:
    script = (
        "git init -q work && cd work && echo text >file && git add file && "
        "git -c user.name=n -c user.email=e@x commit -qm one && git clone -q --bare . ../www/repository.git && "
        "cd ../www/repository.git && git update-server-info"
    )
    if not (folder / "work").exists():
        subprocess.run(["sh", "-ec", script], cwd=folder, check=True)


async def test_git_clones_over_https(server: Server, net: SmallInternet) -> None:
    make_repository(net.folder)
    async with server.lease(SPEC) as slot:
        await slot.write_file("ca.pem", (net.folder / "cert.pem").read_bytes())
        result = await slot.exec("GIT_SSL_CAINFO=$PWD/ca.pem git clone -q https://index.example/repository.git copy")
        assert result.exit_code == 0, result.output
        assert (await slot.exec("cat copy/file")).output == "text\n"


def make_apt_repository(folder: Path) -> None:
    repository = folder / "www" / "apt"
    if repository.exists():
        return
    control = "Package: smalldeb\nVersion: 1.0\nArchitecture: all\nMaintainer: n <e@x>\nDescription: small\n"
    (folder / "deb" / "DEBIAN").mkdir(parents=True)
    (folder / "deb" / "DEBIAN" / "control").write_text(control)
    repository.mkdir()
    deb = repository / "smalldeb.deb"
    subprocess.run(["dpkg-deb", "-b", str(folder / "deb"), str(deb)], check=True, capture_output=True)
    digest = hashlib.sha256(deb.read_bytes()).hexdigest()
    facts = f"Filename: ./smalldeb.deb\nSize: {deb.stat().st_size}\nSHA256: {digest}\n"
    (repository / "Packages").write_text(control + facts + "\n")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg")
async def test_apt_fetches_a_package(server: Server, net: SmallInternet) -> None:
    make_apt_repository(net.folder)
    async with server.lease(SPEC) as slot:
        await slot.exec("mkdir -p lists/partial cache/archives/partial; : >status")
        await slot.write_file("sources.list", "deb [trusted=yes] http://site.example/apt ./\n")
        options = "Dir::Etc::SourceList=$PWD/sources.list Dir::Etc::SourceParts=- Dir::State::Lists=$PWD/lists"
        options += " Dir::State::Status=$PWD/status Dir::Cache=$PWD/cache APT::Sandbox::User=root"
        apt = "apt-get " + " ".join(f"-o {option}" for option in options.split())
        result = await slot.exec(f"{apt} update && {apt} download smalldeb && ls *.deb", timeout_s=60)
        assert result.exit_code == 0, result.output
        assert "smalldeb" in result.output.splitlines()[-1]


async def test_large_bodies_go_both_ways_unchanged(server: Server, net: SmallInternet) -> None:
    async with server.lease(SPEC) as slot:
        script = (
            "head -c 5000000 /dev/urandom >body; curl -sS --data-binary @body http://site.example/echo | cmp - body"
        )
        assert (await slot.exec(script, timeout_s=60)).exit_code == 0
        chunked = "curl -sS -H 'Transfer-Encoding: chunked' --data-binary @body http://site.example/echo | cmp - body"
        assert (await slot.exec(chunked, timeout_s=60)).exit_code == 0
        (entry,) = await slot.network_log()
    assert (entry.host, entry.count) == ("site.example", 2)
    assert entry.sent_bytes == 10_000_000
    assert entry.received_bytes > 10_000_000


async def test_what_a_slot_asked_for_does_not_outlive_its_lease(server: Server) -> None:
    async with server.lease(SPEC) as slot:
        await slot.exec("curl -sS http://other.example/")
        assert [entry.host for entry in await slot.network_log()] == ["other.example"]
    async with server.lease(SPEC) as slot:
        assert await slot.network_log() == []


async def test_a_fork_has_the_same_way_out(server: Server) -> None:
    async with server.lease(SPEC) as slot:
        snapshot = await slot.snapshot(keep_state=True)
    async with server.lease(SPEC, snapshot=snapshot) as fork:
        assert (await fork.exec("curl -sS http://site.example/")).output == "public site.example\n"
    await server.client.drop_snapshot(snapshot)


async def test_the_list_can_be_changed_from_outside(server: Server) -> None:
    async with server.lease(SPEC) as slot:
        assert isinstance(slot.spec.network, NetworkRules)
        await slot.allow_hosts(slot.spec.network.prepare_entries() or ())
        assert (await slot.exec("curl -sS http://other.example/")).output == "public other.example\n"
        assert "not on the list" in (await slot.exec("curl -sS http://site.example/")).output
        with pytest.raises(SandboxError, match="is not a host"):
            await slot.allow_hosts(["http://x/"])
    async with server.lease(SandboxSpec()) as slot:
        with pytest.raises(SandboxError, match="no network rules"):
            await slot.allow_hosts(["site.example"])


@pytest.mark.parametrize("level", ["landlock", "uid", "plain"])
async def test_levels_without_a_network_of_their_own_refuse_rules(level: str) -> None:
    try:
        async with running_server("--level", level) as running:
            for spec in (SPEC, SandboxSpec(network="egress")):
                with pytest.raises(SandboxError, match="network of their own"):
                    await running.client.lease(0, task_id="t", spec=spec)
    except RuntimeError as error:
        pytest.skip(str(error))
