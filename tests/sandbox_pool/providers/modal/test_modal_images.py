"""Images by name: where each comes from, what Modal is asked to build, and which specs share a sandbox."""

from pathlib import Path

import pytest

from sandbox_pool import SlotPool
from sandbox_pool.conformance import all_checks, run_checks
from sandbox_pool.conformance.runner import make_context
from sandbox_pool.errors import HostStartFailed, ImageError
from sandbox_pool.providers.base import ProviderContext
from sandbox_pool.providers.modal.modal_provider import ImageName, ModalProvider
from sandbox_pool.spec import SandboxSpec
from support.modal_place import SPEC, modal_provider

HERE = {path.name for path in Path("/").iterdir() if path.is_dir()}
"""Folders of this machine's root, which is that of emulated sandboxes."""


@pytest.mark.parametrize(
    ("named", "kind", "text"),
    [
        (None, "default", ""),
        ("ubuntu:24.04", "registry", "ubuntu:24.04"),
        ("registry:5000/team/image:1", "registry", "5000/team/image:1"),
        ("ghcr.io/team/image:1", "registry", "ghcr.io/team/image:1"),
        ("dockerfile:images/Dockerfile", "dockerfile", "images/Dockerfile"),
        ("published:tools:v2", "published", "tools:v2"),
        ("id:im-123", "id", "im-123"),
    ],
)
def test_where_an_image_comes_from_is_in_its_name(named, kind, text):
    assert ImageName.parse(named) == ImageName(kind, text)


async def recipe_of(modal, tmp_path, **options):
    """The commands that Modal was asked to build, after a start with these options."""
    async with modal_provider(tmp_path / "state", **options) as provider:
        host = await provider.start("one", SPEC)
        await provider.stop("one")
    commands = [line for image in modal.images for line in image.definition.dockerfile_commands]
    return host, commands


async def test_a_registry_image_is_built_without_its_entrypoint(modal, tmp_path):
    _, commands = await recipe_of(modal, tmp_path, image="ubuntu:24.04", add_python="3.12")
    assert "FROM ubuntu:24.04" in commands
    assert commands[-1] == "ENTRYPOINT []"


async def test_a_dockerfile_is_built_from_its_folder(modal, tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nRUN apt-get install -y git\n")
    _, commands = await recipe_of(modal, tmp_path, image=f"dockerfile:{tmp_path}/Dockerfile")
    assert "RUN apt-get install -y git" in commands


async def test_a_published_image_is_taken_as_it_is(modal, tmp_path):
    modal.publish("main/tools:v2")
    before = [image.image_id for image in modal.images]
    await recipe_of(modal, tmp_path, image="published:tools:v2")
    (request,) = [request for rpc, request in modal.requests if rpc == "SandboxCreateV2"]
    assert [request.definition.image_id] == before
    assert modal.calls["ImageGetOrCreate"] == 0


@pytest.mark.parametrize("image", ["published:unheard:of", "dockerfile:/no/such/Dockerfile"])
async def test_an_image_that_is_not_there_is_named_in_the_error(modal, tmp_path, image):
    async with modal_provider(tmp_path, image=image) as provider:
        with pytest.raises(HostStartFailed, match=image.rpartition(":")[2]):
            await provider.start("one", SPEC)


async def test_what_a_sandbox_asks_of_modal_is_what_the_options_say(modal, tmp_path):
    options = {"cpu": 2, "cpu_limit": 4, "memory_mb": 1024, "cloud": "aws", "timeout_s": 7200, "idle_timeout_s": 60}
    await recipe_of(modal, tmp_path, **options, outbound_domains="pypi.org", inbound_cidrs="127.0.0.0/8")
    (request,) = [request for rpc, request in modal.requests if rpc == "SandboxCreateV2"]
    asked = request.definition
    assert (asked.resources.milli_cpu, asked.resources.milli_cpu_max, asked.resources.memory_mb) == (2000, 4000, 1024)
    assert (asked.timeout_secs, asked.idle_timeout_secs, asked.cloud_provider_str) == (7200, 60, "aws")
    assert list(asked.network_access.allowed_domains) == ["pypi.org"]
    assert list(asked.inbound_cidr_allowlist) == ["127.0.0.0/8"]


async def test_sandboxes_with_a_gpu_are_made_the_older_way_and_serve_the_same(modal, tmp_path):
    host, _ = await recipe_of(modal, tmp_path, gpu="T4")
    assert host.identity.startswith("sb-")
    assert (modal.calls["SandboxCreate"], modal.calls["SandboxCreateV2"]) == (1, 0)
    assert modal.calls["SecretGetOrCreate"] == 0, "a secret per create has a rate limit of its own"


def test_specs_share_sandboxes_unless_their_images_differ(tmp_path):
    provider = ModalProvider(ProviderContext(owner="o", slots=1, state_dir=tmp_path), {"image": "a:1"})
    assert provider.host_key(SandboxSpec()) == provider.host_key(SandboxSpec(image="a:1", cpu=2))
    assert provider.host_key(SandboxSpec(image="/in/the/sandbox")) == provider.host_key(SandboxSpec())
    assert provider.host_key(SandboxSpec(image="b:1")) != provider.host_key(SandboxSpec())


async def test_slots_of_a_sandboxes_image_have_its_whole_root_its_env_and_its_working_directory(make_config, tmp_path):
    (tmp_path / "Dockerfile").write_text(
        'FROM debian:12\nENV GREETING="a b" PATH=/opt/x:/usr/bin:/bin\nWORKDIR /srv/app\n'
    )
    spec = SandboxSpec(image=f"dockerfile:{tmp_path}/Dockerfile")
    async with SlotPool.from_config(make_config()) as pool:
        async with pool.lease("t", spec) as box:
            ran = await box.exec(
                "pwd; echo $GREETING; echo $PATH; env; echo x > f; echo y > /boot/y; ls -A /var /; id -u"
            )
            assert ran.output.splitlines()[:3] == ["/srv/app", "a b", "/opt/x:/usr/bin:/bin"]
            assert "MODAL" not in ran.output
            assert "HRL_" not in ran.output
            assert "hermes-rl" not in ran.output
            assert ran.output.splitlines()[-1] == "0"
            top = set(ran.output.splitlines())
            assert HERE - top == set()
        async with pool.lease("t2", spec) as box:
            assert (await box.exec("ls -A; ls -A /boot/y")).exit_code != 0
        async with pool.lease("t3") as box:
            assert (await box.exec("pwd; echo $GREETING")).output == "/workspace\n\n"


async def test_slots_of_a_sandboxes_image_are_refused_where_its_env_may_hold_secrets(modal, make_config):
    modal.secrets["token"] = {"API_KEY": "s3cret"}
    spec = SandboxSpec(image="debian:12")
    async with SlotPool.from_config(make_config({"secrets": ["token"]})) as pool:
        with pytest.raises(ImageError, match="secrets"):
            async with pool.lease("t", spec):
                pass
        async with pool.lease("t") as box:
            assert "s3cret" not in (await box.exec("env")).output


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_every_promise_is_kept_in_the_image_of_a_sandbox(make_config):
    config = make_config(spec=SandboxSpec(image="debian:12"), slots_per_host=16)
    async with SlotPool.from_config(config) as pool:
        context = await make_context(pool)
        results = [result async for result in run_checks(all_checks(), context)]
        context.close()
    assert {each.id: each.detail for each in results if each.verdict == "failed"} == {}
    assert sum(each.verdict == "passed" for each in results) >= 100
