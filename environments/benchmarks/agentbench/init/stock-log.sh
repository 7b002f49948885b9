#!/bin/bash
# Written for hermes-rl, in place of AgentBench's script of this name, which is in none of its packages: a log of trades,
# `trader | Purchase or Sell | index | count`. The tasks work out their right answers from the log itself.
RANDOM=3
traders=(Alice Bob Cathy David Eve)
kinds=(Purchase Sell)
for _ in {1..400}; do
  echo "${traders[RANDOM * RANDOM % 23 % 5]} | ${kinds[RANDOM % 2]} | $((RANDOM % 60)) | $((RANDOM % 90 + 1))"
done > /home/agent/stock.log
# One trader and one index lead clearly, so that no answer hangs on the order of equals.
for _ in {1..60}; do echo "Bob | Sell | 77 | $((RANDOM % 9 + 1))"; done >> /home/agent/stock.log
