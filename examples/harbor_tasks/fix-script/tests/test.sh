#!/bin/bash
# The reward is the share of checks that hold.
held=0
check() { if "$@" > /dev/null 2>&1; then held=$((held + 1)); else echo "does not hold: $*"; fi; }

check test "$(bash greet.sh Ada)" = 'Hello, Ada!'
check test "$(bash greet.sh)" = 'Hello, world!'

awk -v held=$held 'BEGIN { print held / 2 }' > /logs/verifier/reward.txt
