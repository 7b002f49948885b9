#!/bin/bash
# The reward is the share of checks that hold.
held=0
check() { if "$@" > /dev/null 2>&1; then held=$((held + 1)); else echo "does not hold: $*"; fi; }

check test "$(tr '\n' ' ' < out/all.txt)" = 'part 10 part 20 part 30 '
check bash -c 'bash build.sh && bash build.sh && test $(wc -l < out/all.txt) = 3'

awk -v held=$held 'BEGIN { print held / 2 }' > /logs/verifier/reward.txt
