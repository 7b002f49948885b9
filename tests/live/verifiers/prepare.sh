#!/usr/bin/env bash
# A real verifiers, which pins mcp==2.0.0. Then: pytest -m slow tests/live/verifiers
name=verifiers
. "$(dirname "$0")/../own_environment.sh"
made "$home/venv" 3.11 . "verifiers==0.4.0"
touch "$home/ready"
