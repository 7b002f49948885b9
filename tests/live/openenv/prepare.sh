#!/usr/bin/env bash
# A real OpenEnv, which needs mcp below 2, and a real TRL (5 GB, a few minutes). Then: pytest -m slow tests/live/openenv
name=openenv
. "$(dirname "$0")/../own_environment.sh"
made "$home/venv" 3.11 . "openenv==0.10.0" "trl==1.16.0" "torch==2.13.0" accelerate datasets
touch "$home/ready"
