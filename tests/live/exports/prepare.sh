#!/usr/bin/env bash
# Prepares the readers of the formats we export to, under .tools/readers, each in an environment of its own: Harbor's
# pydantic models and Inspect (120 MB), OpenEnv and pyarrow (400 MB). Then: pytest -m slow tests/live/exports
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
home="$root/.tools/readers"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
for versions in "${HOME:-/root}"/.pyenv/versions/3.12*/bin; do
  [ -d "$versions" ] && PATH="$versions:$PATH" # pyenv hides the versions that are not the chosen one
done
[ -f "$home/ready-openenv" ] && exit 0
mkdir -p "$home"

# Harbor needs Python 3.12. Of its requirements only pydantic is used by the models of a trajectory.
uv venv -q --clear --python 3.12 "$home/harbor"
uv pip install -q --python "$home/harbor/bin/python" --no-deps "harbor==0.25.0"
uv pip install -q --python "$home/harbor/bin/python" "pydantic>=2.12"

uv venv -q --clear --python 3.11 "$home/inspect"
uv pip install -q --python "$home/inspect/bin/python" "inspect-ai==0.3.285"
touch "$home/ready"

# pyarrow is used together with our own environment, so it is for the same Python.
uv venv -q --clear --python "$root/.venv/bin/python" "$home/openenv"
uv pip install -q --python "$home/openenv/bin/python" "openenv==0.10.0" "pyarrow>=18"
touch "$home/ready-openenv"
