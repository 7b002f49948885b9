#!/bin/bash
# The reward is the share of checks that hold.
held=0
check() { if "$@" > /dev/null 2>&1; then held=$((held + 1)); else echo "does not hold: $*"; fi; }

check test "$(tar -xzOf site.tar.gz site/css/main.css)" = 'h1 { color: red }'
check test "$(tr -d ' \n' < files.txt)" = 3

awk -v held=$held 'BEGIN { print held / 2 }' > /logs/verifier/reward.txt
