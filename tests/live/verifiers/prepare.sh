#!/usr/bin/env bash
# Prepares a real verifiers under .tools/verifiers, in an environment of its own with this checkout in it: its pins
# (mcp==2.0.0) must not meet ours. Then: pytest -m slow tests/live/verifiers
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
home="$root/.tools/verifiers"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
mkdir -p "$home"
[ -f "$home/ready" ] && exit 0

uv venv -q --clear --python 3.11 "$home/venv"
# verifiers first and from another folder: our overrides (pyproject.toml) leave out packages that it needs.
(cd / && uv pip install -q --python "$home/venv/bin/python" "verifiers==0.4.0")
(cd "$root" && uv pip install -q --python "$home/venv/bin/python" -e .)
touch "$home/ready"
