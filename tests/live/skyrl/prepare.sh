#!/usr/bin/env bash
# The real types and checks of SkyRL's trainer, without flash-attn, which needs a GPU (6 GB, a few minutes).
# Then: pytest -m slow tests/live/skyrl
name=skyrl
. "$(dirname "$0")/../own_environment.sh"
printf "flash-attn; sys_platform == 'never'\nvllm-router; sys_platform == 'never'\n" > "$home/overrides.txt"
made "$home/venv" 3.12 . --overrides "$home/overrides.txt" "skyrl[skyrl-train]==0.4.0" "torch==2.13.0"
touch "$home/ready"
