"""Slots of hosts that run in the image: the container's whole root with its ENV, WORKDIR and USER, on real engines."""

import json
import tempfile
from pathlib import Path

import pytest

from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from sandbox_pool.conformance import all_checks, run_checks
from sandbox_pool.conformance.runner import make_context
from sandbox_pool.errors import ImageError
from support.container_engines import app_image
from support.containers import Unavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WALKER = Path(__file__).parents[2] / "support/tree_facts.py"
BY_ENGINE = {".dockerenv", "run/.containerenv", "etc/hostname", "etc/mtab"}
"""What an engine mounts or writes anew for each container."""


@pytest.fixture(params=["docker", "podman", "rootless"])
def engine(request, engines):
    return engines(request.param)


@pytest.fixture
def image(engine):
    try:
        return app_image(engine)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def make_config(engine, image, tmp_path):
    def make(*, spec=None, **options):
        options = engine.options(
            **{"image": image, "mounts": [], "cap_add": ["SYS_ADMIN"], "ready_timeout_s": 300, **options}
        )
        if "setpriv" in str(engine.command):
            options["data_path"] = "exec"
        settings = {"slots_per_host": 12, "max_hosts": 1, "start_attempts": 1, "state_dir": tmp_path / "state"}
        return PoolConfig(
            provider=engine.kind, provider_options=options, spec=spec or SandboxSpec(image=image), **settings
        )

    return make


@pytest.fixture
def secret():
    with tempfile.NamedTemporaryFile("w", prefix="hrl-secret-", dir="/var/tmp") as file:
        file.write("only for the container")
        file.flush()
        Path(file.name).chmod(0o644)
        yield file.name


async def test_the_slot_has_the_whole_root_env_workdir_and_user_and_leaves_nothing_in_them(make_config, secret):
    async with SlotPool.from_config(make_config(mounts=[f"{secret}:/run/secrets/token:ro"])) as pool:
        async with pool.lease("t") as box:
            ran = await box.exec("pwd; echo $GREETING; hello; id -un; id -gn; echo $HOME; cat data.txt /root/.p* 2>&1")
            assert ran.output.splitlines()[:7] == [
                "/testbed",
                "hi",
                "hello",
                "app",
                "mail",
                "/testbed",
                "of the image",
            ]
            assert "denied" in ran.output.splitlines()[-1]
            seen = await box.exec("cat /run/secrets/token; ls -A /run/hermes-rl /scratch; env; cat /proc/1/environ")
            assert "only for" not in seen.output
            assert "HRL_" not in seen.output
            assert seen.output.count("No such file") == 2, seen.output
            await box.write_file("data.txt", b"changed")
            snapshot = await box.snapshot()
        async with pool.lease("u") as box:
            assert (await box.exec("cat data.txt")).output == "of the image\n"
        async with pool.lease_from(snapshot, "v") as box:
            assert (await box.exec("pwd; cat data.txt; hello")).output == "/testbed\nchangedhello\n"


async def test_the_tree_in_the_slot_is_the_tree_in_a_container(make_config, engine, image):
    program = WALKER.read_text()
    words = ["--rm", "--network=none", "--user=0", "--entrypoint=python3"]
    ran = engine.run("run", *words, image, "-c", program, "/")
    wanted = json.loads(ran)
    spec = SandboxSpec(image=image, user="0")
    async with SlotPool.from_config(make_config(spec=spec)) as pool, pool.lease("t") as box:
        await box.write_file("/tmp/walker.py", program.encode())
        await box.exec("python3 /tmp/walker.py / > /tmp/tree.json")
        seen = json.loads(await box.read_file("/tmp/tree.json"))
    different = {
        bytes.fromhex(path).decode(): (wanted.get(path), seen.get(path))
        for path in {*wanted, *seen}
        if wanted.get(path) != seen.get(path)
    }
    others = {path: facts for path, facts in different.items() if path not in BY_ENGINE and not path.startswith("tmp/")}
    assert others == {}
    assert len(seen) > 3000


async def test_every_promise_is_kept_in_it(make_config, image):
    async with SlotPool.from_config(make_config(spec=SandboxSpec(image=image, user="0"))) as pool:
        context = await make_context(pool)
        results = [result async for result in run_checks(all_checks(), context)]
        context.close()
    assert context.info.isolation == "namespaces"
    assert {each.id: each.detail for each in results if each.verdict == "failed"} == {}
    assert sum(each.verdict == "passed" for each in results) >= 100


async def test_without_namespaces_it_is_refused_and_says_what_is_missing(make_config):
    async with SlotPool.from_config(make_config(cap_add=[])) as pool:
        with pytest.raises(ImageError, match="SYS_ADMIN"):
            await pool.acquire("t")
        async with pool.lease("t", SandboxSpec()) as box:
            assert (await box.exec("echo $((6 * 7))")).output == "42\n"
