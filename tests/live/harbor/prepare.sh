#!/usr/bin/env bash
# Prepares a real Harbor under .tools/harbor, in an environment of its own (Python 3.12) with this checkout in it.
# Then: pytest -m slow tests/live/harbor
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
home="$root/.tools/harbor"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
for versions in "${HOME:-/root}"/.pyenv/versions/3.12*/bin; do
  [ -d "$versions" ] && PATH="$versions:$PATH" # pyenv hides the versions that are not the chosen one
done
mkdir -p "$home"
[ -f "$home/ready" ] && exit 0

uv venv -q --clear --python 3.12 "$home/venv"
# Harbor first and from another folder: our overrides (pyproject.toml) leave out packages that it needs.
(cd "$home" && uv pip install -q --python "$home/venv/bin/python" "harbor==0.24.0")
(cd "$root" && uv pip install -q --python "$home/venv/bin/python" -e .)
touch "$home/ready"
