#!/usr/bin/env bash
# A real Harbor. Then: pytest -m slow tests/live/harbor
name=harbor
. "$(dirname "$0")/../own_environment.sh"
made "$home/venv" 3.12 . "harbor==0.24.0"
touch "$home/ready"
