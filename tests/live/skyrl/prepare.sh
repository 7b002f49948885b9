#!/usr/bin/env bash
# Prepares the real types and checks of SkyRL's trainer (6 GB, a few minutes) under .tools/skyrl, in an environment of its
# own with this checkout in it; without flash-attn, which needs a GPU. Then: pytest -m slow tests/live/skyrl
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
home="$root/.tools/skyrl"
python="$home/venv/bin/python"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
for versions in "${HOME:-/root}"/.pyenv/versions/3.12*/bin; do
  [ -d "$versions" ] && PATH="$versions:$PATH" # pyenv hides the versions that are not the chosen one
done
mkdir -p "$home"
[ -f "$home/ready" ] && exit 0

uv venv -q --clear --python 3.12 "$home/venv" # SkyRL needs 3.12
printf "flash-attn; sys_platform == 'never'\nvllm-router; sys_platform == 'never'\n" > "$home/overrides.txt"
# SkyRL first and without our config: its overrides (pyproject.toml) leave out packages that it needs.
uv pip install -q --no-config --python "$python" --overrides "$home/overrides.txt" "skyrl[skyrl-train]==0.4.0" "torch==2.13.0"
(cd "$root" && uv pip install -q --python "$python" -e .)
touch "$home/ready"
