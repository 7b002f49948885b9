#!/bin/bash
set -e
grep -rl '^token=' tree > where.txt
grep -rh '^token=' tree | cut -d= -f2 > token.txt
