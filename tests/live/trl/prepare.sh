#!/usr/bin/env bash
# Prepares a real TRL on the CPU (5 GB, a few minutes) under .tools/trl: an environment of its own with this checkout in
# it, and SmolLM2 in Hugging Face form. Then: pytest -m slow tests/live/trl
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
home="$root/.tools/trl"
python="$home/venv/bin/python"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
mkdir -p "$home"
[ -f "$home/ready" ] && exit 0

uv venv -q --clear --python 3.11 "$home/venv"
# TRL first and from another folder: our overrides (pyproject.toml) leave out packages that it needs.
(cd / && uv pip install -q --python "$python" "trl==1.16.0" "torch==2.13.0" accelerate datasets gguf kernels peft)
(cd "$root" && uv pip install -q --python "$python" -e '.[cpu-model]')
"$home/venv/bin/hermes-rl" model get

"$python" - "$home/smollm2" <<'PY'
import sys
from pathlib import Path

from agent_loop.local_models.cpu_model.weights import smollm2_gguf
from environments.trainers.cpu_weights import hugging_face_copy

hugging_face_copy(smollm2_gguf(), Path(sys.argv[1]))
PY
touch "$home/ready"
