"""The job: nothing in it mends itself, nothing in it is secret, and its id says what is in it."""

import json
from pathlib import Path

import pytest

from environments.errors import UsageError
from sandbox_pool.providers.base import ProviderContext
from sandbox_pool.providers.nomad.nomad_job import render_job
from sandbox_pool.providers.nomad.nomad_options import NomadOptions
from sandbox_pool.providers.nomad.nomad_provider import NomadProvider
from sandbox_pool.providers.remote_start import LOADER, loader_text
from sandbox_pool.spec import SandboxSpec
from support.cli_verb import run_verb

ROOT = Path(__file__).parents[4]


@pytest.fixture
def context(tmp_path):
    return ProviderContext(owner="o", slots=4, state_dir=tmp_path / "state", min_isolation="landlock")


def group_of(job):
    (group,) = job["TaskGroups"]
    return group


def task_of(job):
    (task,) = group_of(job)["Tasks"]
    return task


def test_nomad_may_neither_restart_nor_move_nor_replace_a_host(context):
    group = group_of(render_job(NomadOptions(), context, "0"))
    assert group["RestartPolicy"]["Attempts"] == 0
    assert task_of({"TaskGroups": [group]})["RestartPolicy"]["Attempts"] == 0
    assert group["ReschedulePolicy"] == {"Attempts": 0, "Unlimited": False}
    assert group["Disconnect"]["Replace"] is False
    assert group["Disconnect"]["LostAfter"] > 0


def test_durations_are_whole_nanoseconds(context):
    job = render_job(NomadOptions(), context, "0")
    assert task_of(job)["KillTimeout"] == 10 * 10**9
    assert isinstance(group_of(job)["Disconnect"]["LostAfter"], int)


@pytest.mark.parametrize("change", [{"memory_mb": 2000}, {"python": "/opt/python3"}, {"node_pool": "gpu"}])
def test_another_job_has_another_id(context, change):
    before = render_job(NomadOptions(), context, "0")
    assert render_job(NomadOptions(), context, "0") == before
    assert render_job(NomadOptions(**change), context, "0")["ID"] != before["ID"]
    assert render_job(NomadOptions(), context, "1")["ID"] != before["ID"]


def test_the_job_holds_no_secret(context):
    provider = NomadProvider(context, {"token": "acl-secret"})
    text = json.dumps(provider.job(SandboxSpec()))
    assert "acl-secret" not in text
    assert context.token("any") not in text


def test_what_the_scheduler_is_asked_for(context):
    options = NomadOptions(
        cpu_mhz=900,
        memory_mb=800,
        memory_max_mb=1600,
        disk_mb=700,
        priority=80,
        datacenters="dc1,dc2",
        constraints=["${attr.cpu.arch} = amd64"],
        host_network="private",
        region="eu",
        namespace="rl",
        user="sandbox",
    )
    job = render_job(options, context, "0")
    assert task_of(job)["Resources"] == {"CPU": 900, "MemoryMB": 800, "MemoryMaxMB": 1600}
    assert task_of(job)["User"] == "sandbox"
    assert group_of(job)["EphemeralDisk"]["SizeMB"] == 700
    assert group_of(job)["Networks"] == [{"DynamicPorts": [{"Label": "slot", "HostNetwork": "private"}]}]
    assert (job["Priority"], job["Datacenters"], job["Region"], job["Namespace"]) == (80, ["dc1", "dc2"], "eu", "rl")
    assert job["Constraints"] == [{"LTarget": "${attr.cpu.arch}", "Operand": "=", "RTarget": "amd64"}]


def test_a_constraint_that_is_none_is_refused_before_anything_starts(context):
    with pytest.raises(ValueError, match="three words"):
        NomadProvider(context, {"constraints": ["amd64"]})


def test_docker_is_not_privileged_unless_asked(context):
    plain = task_of(render_job(NomadOptions(driver="docker", image="img"), context, "0"))
    assert plain["Driver"] == "docker"
    assert plain["Config"]["image"] == "img"
    assert plain["Config"]["privileged"] is False
    assert "cap_add" not in plain["Config"]
    asked = NomadOptions(driver="docker", image="img", privileged=True, cap_add="sys_admin,net_admin")
    config = task_of(render_job(asked, context, "0"))["Config"]
    assert (config["privileged"], config["cap_add"]) == (True, ["sys_admin", "net_admin"])


def test_docker_off_the_hosts_network_publishes_the_port(context):
    options = NomadOptions(driver="docker", image="img", network_mode="bridge")
    task = task_of(render_job(options, context, "0"))
    assert task["Config"]["ports"] == ["slot"]
    assert task["Env"]["HRL_BIND"] == "0.0.0.0"


def test_hosts_of_one_image_do_not_serve_another(context):
    provider = NomadProvider(context, {"driver": "docker", "image": "img"})
    plain, other, folder = SandboxSpec(), SandboxSpec(image="other"), SandboxSpec(image="/srv/root")
    assert provider.host_key(plain) == provider.host_key(folder) != provider.host_key(other)
    arguments = task_of(provider.job(other))["Config"]["args"]
    assert arguments[arguments.index("--image") + 1] == "other"
    bare = NomadProvider(context, {})
    assert bare.host_key(plain) == bare.host_key(other)


def test_apptainer_enters_the_image_from_a_raw_exec_task(tmp_path):
    context = ProviderContext(owner="o", slots=4, state_dir=tmp_path, scratch_dir=Path("/scratch"))
    options = NomadOptions(driver="apptainer", image="/images/a.sif", volumes="/data:/data:ro", apptainer_args="--nv")
    task = task_of(render_job(options, context, "0"))
    assert (task["Driver"], task["Config"]["command"]) == ("raw_exec", "apptainer")
    arguments = task["Config"]["args"]
    inside = arguments.index("/images/a.sif")
    assert arguments[0] == "exec"
    assert arguments[inside + 1 : inside + 3] == ["python3", "-c"]
    assert [arguments[at + 1] for at in range(inside) if arguments[at] == "--bind"] == [
        "${NOMAD_ALLOC_DIR}",
        "${NOMAD_TASK_DIR}",
        "/scratch",
        "/data:/data:ro",
    ]
    assert "--nv" in arguments[:inside]
    assert task["Env"]["HRL_SCRATCH"] == "/scratch/${NOMAD_ALLOC_ID}"


@pytest.mark.parametrize("driver", ["docker", "apptainer"])
def test_a_container_without_an_image_is_refused(context, driver):
    with pytest.raises(ValueError, match="needs an image"):
        render_job(NomadOptions(driver=driver), context, "0")


def test_nomad_finds_nothing_to_fill_in_in_the_loader():
    assert "${" not in loader_text()
    compile(loader_text(), str(LOADER), "exec")
    assert len(loader_text()) < 7000


def test_the_shipped_job_is_what_the_command_prints(capsys):
    assert run_verb("pool", "job", "--provider", "nomad") == 0
    printed = json.loads(capsys.readouterr().out)["Job"]
    shipped = json.loads((ROOT / "configs" / "nomad" / "job.json").read_text())["Job"]
    for job in (printed, shipped):  # the server and with it the id change with every version
        del job["ID"], job["Name"], task_of(job)["Env"]["HRL_SERVER_SHA256"]
    assert printed == shipped, "render it again: hermes-rl pool job --provider nomad > configs/nomad/job.json"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--provider", "local"), "not started from a job"),
        (("--provider", "nomad", "--option", "driver=docker"), "needs an image"),
        (("--provider", "nomad", "--option", "colour=red"), "colour"),
    ],
)
def test_a_job_that_cannot_be_is_a_usage_error(arguments, said):
    with pytest.raises(UsageError, match=said):
        run_verb("pool", "job", *arguments)


@pytest.mark.parametrize("name", ["nomad/terminal_tasks", "nomad/apptainer"])
def test_the_shipped_environments_use_the_provider(name, tmp_path):
    from environments.launch import load_environment

    environment = load_environment(name, ["--env.pool.state_dir", str(tmp_path)])
    pool = environment.config.pool
    assert pool.provider == "nomad"
    NomadProvider(ProviderContext.of(pool, "o"), pool.provider_options)
