#!/bin/bash
set -e
awk -F, 'NR > 1 { s += $3 } END { print s }' sales.csv > total.txt
awk -F, 'NR > 1 { s[$2] += $3 } END { for (k in s) print s[k], k }' sales.csv | sort -n | tail -1 | cut -d' ' -f2 > best.txt
