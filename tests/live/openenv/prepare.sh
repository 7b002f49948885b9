#!/usr/bin/env bash
# Prepares a real OpenEnv and a real TRL (5 GB, a few minutes) under .tools/openenv, in an environment of their own with
# this checkout in it: OpenEnv's mcp (below 2) must not meet ours. Then: pytest -m slow tests/live/openenv
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
home="$root/.tools/openenv"
python="$home/venv/bin/python"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
mkdir -p "$home"
[ -f "$home/ready" ] && exit 0

uv venv -q --clear --python 3.11 "$home/venv"
# They first and without our config: its overrides (pyproject.toml) leave out packages that they need.
uv pip install -q --no-config --python "$python" "openenv==0.10.0" "trl==1.16.0" "torch==2.13.0" accelerate datasets
(cd "$root" && uv pip install -q --python "$python" -e .)
touch "$home/ready"
