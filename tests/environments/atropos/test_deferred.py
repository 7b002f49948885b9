"""What atroposlib imports and we seldom use is imported when it is used, and is then the real thing."""

import subprocess
import sys


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_environment_is_imported_without_the_heavy_packages() -> None:
    found = "import environments.base, sys; print(sorted({'openai', 'transformers', 'wandb'} & set(sys.modules)))"
    assert python(found) == "[]"


USED = {
    "base.AutoTokenizer.from_pretrained": "transformers.AutoTokenizer",
    "base.wandb.init": "wandb",
    "base.np.mean": "numpy",
    "server_handling.openai_server.openai.AsyncClient": "openai",
    "server_handling.vllm_server.AutoTokenizer.from_pretrained": "transformers.AutoTokenizer",
    "server_handling.server_baseline.ChatCompletion.model_validate": "openai.types.chat.ChatCompletion",
}
"""What atroposlib uses -> where the real one is."""


def test_a_deferred_name_is_the_real_one_when_it_is_used() -> None:
    """All in one process: each Python that imports transformers and wandb takes four seconds."""
    lines = ["import environments.base", *(f"import atroposlib.envs.{use.rsplit('.', 2)[0]}" for use in USED)]
    lines += [f"found_{number} = atroposlib.envs.{use}" for number, use in enumerate(USED)]
    lines += ["import numpy, openai.types.chat, transformers, wandb"]
    for number, (use, real) in enumerate(USED.items()):
        lines.append(f"assert found_{number} == {real}.{use.rpartition('.')[2]}, {use!r}")
    assert python("\n".join(lines)) == ""


def test_a_completion_can_be_made_and_recognised() -> None:
    code = """
import environments.base
from atroposlib.envs.server_handling.managed_server import Completion as deferred
made = deferred(id="x", choices=[], created=0, model="m", object="text_completion")
from openai.types import Completion
assert type(made) is Completion and isinstance(made, deferred)
"""
    assert python(code) == ""
