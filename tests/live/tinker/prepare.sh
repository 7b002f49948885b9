#!/usr/bin/env bash
# Prepares a real Tinker API server on the CPU (skyrl's, on JAX) and SmolLM2 in Hugging Face form under .tools/tinker, in
# an environment of its own with this checkout in it (2 GB). Then: pytest -m slow tests/live/tinker
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
home="$root/.tools/tinker"
python="$home/venv/bin/python"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
for versions in "${HOME:-/root}"/.pyenv/versions/3.12*/bin; do
  [ -d "$versions" ] && PATH="$versions:$PATH" # pyenv hides the versions that are not the chosen one
done
mkdir -p "$home"
[ -f "$home/ready" ] && exit 0

uv venv -q --clear --python 3.12 "$home/venv" # skyrl needs 3.12
# skyrl first and without our config: its overrides (pyproject.toml) leave out packages that it needs.
uv pip install -q --no-config --python "$python" "skyrl[tinker,jax]==0.4.0" aiohttp orjson pybase64 loguru
(cd "$root" && uv pip install -q --python "$python" -e .)

# The model's folder is written by a newer transformers than skyrl takes.
uv venv -q --clear --python 3.12 "$home/writer"
(cd "$root" && uv pip install -q --python "$home/writer/bin/python" "torch==2.13.0" accelerate -e '.[cpu-model]')
"$home/writer/bin/hermes-rl" model get >/dev/null
"$home/writer/bin/python" - "$home/smollm2" <<'PY'
import sys
from pathlib import Path

from agent_loop.local_models.cpu_model.weights import smollm2_gguf
from environments.trainers.cpu_weights import hugging_face_copy

hugging_face_copy(smollm2_gguf(), Path(sys.argv[1]))
PY
touch "$home/ready"
