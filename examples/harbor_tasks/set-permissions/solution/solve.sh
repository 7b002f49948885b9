#!/bin/bash
set -e
chmod 755 run.sh
chmod 600 key.txt
