#!/usr/bin/env bash
# A real NeMo Gym; later versions want a newer Python than 3.12. Then: pytest -m slow tests/live/nemo_gym
name=nemo-gym
. "$(dirname "$0")/../own_environment.sh"
made "$home/venv" 3.12 "" "nemo-gym==0.4.0"
touch "$home/ready"
