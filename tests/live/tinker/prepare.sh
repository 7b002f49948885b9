#!/usr/bin/env bash
# A real Tinker API server on the CPU (SkyRL's, on JAX), Tinker's cookbook, whose pins SkyRL's exclude, and SmolLM2
# (4 GB). Then: pytest -m slow tests/live/tinker
name=tinker
. "$(dirname "$0")/../own_environment.sh"
made "$home/venv" 3.12 . "skyrl[tinker,jax]==0.4.0" aiohttp orjson pybase64 loguru
made "$home/cookbook" 3.12 . "tinker-cookbook==0.5.7" "tinker==0.25.0"
smollm2
touch "$home/ready"
