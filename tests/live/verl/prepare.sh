#!/usr/bin/env bash
# Prepares a real verl (6 GB, a few minutes) and SmolLM2 in Hugging Face form under .tools/verl, in an environment of its
# own with this checkout in it. Then: pytest -m slow tests/live/verl
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
home="$root/.tools/verl"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
mkdir -p "$home"
[ -f "$home/ready" ] && exit 0

uv venv -q --clear --python 3.11 "$home/venv"
# verl first and without our config: its overrides (pyproject.toml) leave out packages that it needs.
uv pip install -q --no-config --python "$home/venv/bin/python" "verl==0.9.1" "torch==2.13.0" cachetools
(cd "$root" && uv pip install -q --python "$home/venv/bin/python" -e '.[cpu-model]')
"$home/venv/bin/hermes-rl" model get >/dev/null

# The model's folder is written by a newer transformers than verl takes.
uv venv -q --clear --python 3.11 "$home/writer"
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
