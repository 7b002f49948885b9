#!/bin/bash
set -e
cat > build.sh <<'END'
mkdir -p out
cat parts/*.txt > out/all.txt
END
bash build.sh
