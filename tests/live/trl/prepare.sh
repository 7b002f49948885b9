#!/usr/bin/env bash
# A real TRL on the CPU, and SmolLM2 (5 GB, a few minutes). Then: pytest -m slow tests/live/trl
name=trl
. "$(dirname "$0")/../own_environment.sh"
made "$home/venv" 3.11 '.[cpu-model]' "trl==1.16.0" "torch==2.13.0" accelerate datasets gguf kernels peft
"$home/venv/bin/hermes-rl" model get >/dev/null
smollm2
touch "$home/ready"
