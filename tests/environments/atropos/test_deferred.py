"""What atroposlib imports and we seldom use is imported when it is used, and is then the real thing."""

import subprocess
import sys

import pytest


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_environment_is_imported_without_the_heavy_packages() -> None:
    found = "import environments.base, sys; print(sorted({'openai', 'transformers', 'wandb'} & set(sys.modules)))"
    assert python(found) == "[]"


@pytest.mark.parametrize(
    ("place", "use"),
    [
        ("base.AutoTokenizer", "from_pretrained"),
        ("base.wandb", "init"),
        ("base.np", "mean"),
        ("server_handling.openai_server.openai", "AsyncClient"),
        ("server_handling.vllm_server.AutoTokenizer", "from_pretrained"),
        ("server_handling.server_baseline.ChatCompletion", "model_validate"),
    ],
)
def test_a_deferred_name_is_the_real_one_when_it_is_used(place: str, use: str) -> None:
    module, _, name = place.rpartition(".")
    real = {
        "AutoTokenizer": "transformers.AutoTokenizer",
        "np": "numpy",
        "ChatCompletion": "openai.types.chat.ChatCompletion",
    }.get(name, name)
    code = f"""
import environments.base
from atroposlib.envs.{module} import {name} as deferred
found = deferred.{use}
import {real.partition(".")[0]}
import openai.types.chat
assert found == {real}.{use}, (found, {real}.{use})
"""
    assert python(code) == ""


def test_a_completion_can_be_made_and_recognised() -> None:
    code = """
import environments.base
from atroposlib.envs.server_handling.managed_server import Completion as deferred
made = deferred(id="x", choices=[], created=0, model="m", object="text_completion")
from openai.types import Completion
assert type(made) is Completion and isinstance(made, deferred)
"""
    assert python(code) == ""
