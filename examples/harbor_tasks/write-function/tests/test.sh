#!/bin/bash
# The reward is the share of checks that hold.
held=0
check() { if "$@" > /dev/null 2>&1; then held=$((held + 1)); else echo "does not hold: $*"; fi; }

check test "$(python3 -c 'import text_tools as t; print(t.title("gOOD old tEXT"))')" = 'Good Old Text'
check test "$(python3 -c 'import text_tools as t; print(t.initials("good old text"))')" = GOT

awk -v held=$held 'BEGIN { print held / 2 }' > /logs/verifier/reward.txt
