#!/usr/bin/env bash
# Prepares the real trackers (TensorBoard, MLflow, trackio; wandb is there already) under .tools/trackers, in an
# environment of its own with this checkout in it. Then: pytest -m slow tests/live/trackers
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
home="$root/.tools/trackers"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
mkdir -p "$home"
[ -f "$home/ready" ] && exit 0

uv venv -q --clear --python 3.11 "$home/venv"
(cd "$root" && uv pip install -q --python "$home/venv/bin/python" -e '.[wandb,tensorboard,trackio]')
# The whole MLflow, whose store can be a file; the client alone (the extra) speaks to a server.
uv pip install -q --no-config --python "$home/venv/bin/python" mlflow tensorboard
touch "$home/ready"
