#!/bin/bash
set -e
cat > greet.sh <<'END'
name=${1:-world}
echo "Hello, $name!"
END
