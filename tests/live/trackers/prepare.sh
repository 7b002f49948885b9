#!/usr/bin/env bash
# The real trackers, and what `learn` needs. Then: pytest -m slow tests/live/trackers
name=trackers
. "$(dirname "$0")/../own_environment.sh"
# The whole MLflow, whose store can be a folder; the client alone (the extra) speaks to a server.
made "$home/venv" 3.11 '.[wandb,tensorboard,trackio,learn]' mlflow tensorboard
touch "$home/ready"
