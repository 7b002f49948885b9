#!/bin/bash
# The reward is the share of checks that hold.
held=0
check() { if "$@" > /dev/null 2>&1; then held=$((held + 1)); else echo "does not hold: $*"; fi; }

check test "$(wc -l < errors.log)" = 10
check sort -c errors.log
check test "$(grep -c ' ERROR ' errors.log)" = 10

awk -v held=$held 'BEGIN { print held / 3 }' > /logs/verifier/reward.txt
