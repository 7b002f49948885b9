"""The doctor reports every subject, tells a fix, and never shows a secret."""

import asyncio
import importlib.metadata
import json

import pytest
from aiohttp import web

from environments.apps.cli.doctor import as_json
from environments.apps.cli.main import main
from environments.apps.doctor import doctor_checks
from environments.apps.doctor.doctor_checks import PLACES, Finding, endpoints, run_checks
from sandbox_pool.providers.base import provider_names


@pytest.fixture
async def model_server():
    async def health(_request):
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def test_json_has_one_key_per_subject(capsys):
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {
        "python",
        "compiler",
        "isolation",
        "cgroups",
        "model",
        "extras",
        "run-api",
        "nomad",
        "modal",
        "docker",
        "podman",
        "apptainer",
        "slurm",
        "ssh",
        "daytona",
    } <= set(report)
    assert report["python"]["status"] == "ok"
    assert code == (1 if any(entry["status"] == "broken" for entry in report.values()) else 0)


def test_what_is_missing_comes_with_a_fix():
    for finding in asyncio.run(run_checks()):
        if finding.status == "missing":
            assert finding.fix, finding


def test_extras_are_those_whose_packages_are_here(monkeypatch):
    found = asyncio.run(doctor_checks.extras())
    assert {"docker", "podman", "daytona", "mcp", "modal"} <= set(found.detail.partition(";")[0][11:].split(", "))
    wanted = ["here>=1", "pytest>=8; extra == 'docker'", "hermes-rl[docker]; extra == 'podman'"]
    wanted += ["no.such[more]<3; python_version > '3' and extra == \"trl\"", "hermes-rl[trl]; extra == 'rl'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: wanted)
    assert asyncio.run(doctor_checks.extras()).detail == "installed: docker, podman; not: rl, trl"


def test_a_place_without_a_provider_is_never_ok():
    found = {finding.subject: finding for finding in asyncio.run(run_checks()) if finding.subject in PLACES}
    for name, finding in found.items():
        if name not in provider_names():
            assert (finding.status, f"no provider {name!r}" in finding.detail) == ("missing", True)
        elif finding.status == "ok":
            assert f"pool check --provider {name}" in finding.detail


def test_secrets_are_never_shown(monkeypatch, capsys):
    monkeypatch.setenv("NOMAD_ADDR", "http://user:hunter2@127.0.0.1:9")
    monkeypatch.setenv("NOMAD_TOKEN", "hunter2")
    monkeypatch.setenv("MODAL_TOKEN_ID", "hunter2")
    main(["doctor"])
    main(["doctor", "--json"])
    assert "hunter2" not in capsys.readouterr().out


async def test_an_endpoint_that_answers_is_ok(model_server):
    (finding,) = await endpoints({"servers": [{"base_url": f"{model_server}/v1"}]})
    assert (finding.subject, finding.status) == ("endpoint", "ok")


async def test_an_endpoint_that_is_down_is_broken_with_a_fix():
    (finding,) = await endpoints({"openai": {"base_url": "http://127.0.0.1:9/v1"}})
    assert finding.status == "broken"
    assert "base_url" in finding.fix


async def test_a_tokenizer_that_is_not_here_is_broken(tmp_path):
    (finding,) = await endpoints({"env": {"tokenizer_name": str(tmp_path)}})
    assert (finding.subject, finding.status) == ("tokenizer", "broken")


async def test_a_check_that_crashes_is_a_finding(monkeypatch):
    async def strange():
        raise RuntimeError("odd machine")

    monkeypatch.setattr(doctor_checks, "CHECKS", (strange,))
    (finding,) = await run_checks()
    assert finding == Finding("strange", "broken", "could not be checked: RuntimeError: odd machine")


def test_a_subject_found_twice_becomes_a_list():
    report = as_json([Finding("endpoint", "ok", "a"), Finding("endpoint", "broken", "b")])
    assert [entry["detail"] for entry in report["endpoint"]] == ["a", "b"]
