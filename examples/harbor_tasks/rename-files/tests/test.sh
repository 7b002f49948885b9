#!/bin/bash
# The reward is the share of checks that hold.
held=0
check() { if "$@" > /dev/null 2>&1; then held=$((held + 1)); else echo "does not hold: $*"; fi; }

check test -f notes/one.txt
check test -f notes/two.txt
check test -f notes/three.txt -a -f notes/Keep.md

awk -v held=$held 'BEGIN { print held / 3 }' > /logs/verifier/reward.txt
