#!/bin/bash
# The reward is the share of checks that hold.
held=0
check() { if "$@" > /dev/null 2>&1; then held=$((held + 1)); else echo "does not hold: $*"; fi; }

check test "$(cat where.txt)" = tree/moss/two.conf
check test "$(cat token.txt)" = f3a91c

awk -v held=$held 'BEGIN { print held / 2 }' > /logs/verifier/reward.txt
