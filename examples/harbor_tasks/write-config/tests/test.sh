#!/bin/bash
# The reward is the share of checks that hold.
held=0
check() { if "$@" > /dev/null 2>&1; then held=$((held + 1)); else echo "does not hold: $*"; fi; }

check test "$(cat /etc/station.conf)" = station=north
check test "$(cat station.conf)" = station=north

awk -v held=$held 'BEGIN { print held / 2 }' > /logs/verifier/reward.txt
