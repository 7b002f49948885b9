"""What a user runs on Modal: the shipped config as it is, the command line, and what is said when something lacks."""

import asyncio
import json
import os
import subprocess
import sys

import modal as modal_sdk
import pytest

from environments.errors import UsageError
from sandbox_pool.errors import HostStartFailed
from support.cli_verb import run_verb
from support.modal_place import SPEC, modal_provider, nothing_left
from support.modal_sdk import environ


def command(*words):
    """`hermes-rl WORDS` in a process of its own; the emulator is in its environment."""
    return subprocess.run([sys.executable, "-m", "environments.apps.cli.main", *words], capture_output=True, text=True)


@pytest.mark.timeout(300)
async def test_the_shipped_config_runs_as_it_is(modal, tmp_path):
    words = ("modal/terminal_tasks", "--out", str(tmp_path / "out"), "--env.pool.state_dir", str(tmp_path / "state"))
    done = await asyncio.to_thread(command, "process", *words, "--env.total_steps", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    rollouts = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert [each["outcome"] for each in rollouts] == ["finished"] * 4
    assert sum(each["metrics"]["tool_calls_executed_ok"] for each in rollouts) > 0
    assert max(each["score"] for each in rollouts) == 1.0
    assert len(modal.sandboxes) == 1
    await nothing_left(modal)


async def test_the_command_line_checks_promises_there(modal, tmp_path, capsys):
    words = ("--provider", "modal", "--option", "app=mine", "--option", "region=us-east,us-west", "--slots", "2")
    state = ("--state-dir", str(tmp_path))
    assert await asyncio.to_thread(run_verb, "pool", "check", "--json", "--only", "execution.exit", *words, *state) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["failed"] == 0
    (request,) = [request for rpc, request in modal.requests if rpc == "SandboxCreateV2"]
    assert list(request.definition.scheduler_placement.regions) == ["us-east", "us-west"]
    await nothing_left(modal)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("memory=4096", "unknown option 'memory'; did you mean 'memory_mb'"),
        ("xyzzy=red", "unknown option 'xyzzy'; valid: add_python, "),
        ("timeout_s=600", "must be longer than drain_s"),
        ("timeout_s=90000", "less than or equal to 86400"),
        ("image=registry:", "names nothing"),
        ("cpu_limit=4", "cpu_limit needs cpu"),
    ],
)
def test_an_option_that_cannot_be_is_a_usage_error_in_one_sentence(option, said, tmp_path):
    with pytest.raises(UsageError) as refused:
        run_verb("pool", "check", "--provider", "modal", "--option", option, "--state-dir", str(tmp_path))
    assert said in str(refused.value)


async def test_without_a_token_the_start_says_how_to_get_one(tmp_path):
    nowhere = {"MODAL_CONFIG_PATH": str(tmp_path / "none.toml"), "MODAL_SERVER_URL": "http://127.0.0.1:9"}
    with environ({**nowhere, "MODAL_TOKEN_ID": "", "MODAL_TOKEN_SECRET": ""}):
        del os.environ["MODAL_TOKEN_ID"], os.environ["MODAL_TOKEN_SECRET"]
        modal_sdk.Client.set_env_client(None)
        async with modal_provider(tmp_path / "state") as provider:
            with pytest.raises(HostStartFailed, match="modal token new"):
                await provider.start("one", SPEC)
