#!/bin/bash
set -e
tar -czf site.tar.gz site
find site -type f | wc -l > files.txt
