#!/bin/bash
set -e
cd notes
for file in *.TXT; do mv "$file" "${file,,}"; done
