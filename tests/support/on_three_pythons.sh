#!/usr/bin/env bash
# Started by root: the suite on each Python, as root and as an ordinary user, in random order, beside four busy loops.
# Each run is a clone of HEAD with a venv of its own. The logs and the sums stay in $LOGS.
set -uo pipefail
cd "$(dirname "$0")/../.."

logs=${LOGS:-/tmp/hermes-rl-three-pythons}
mkdir -p "$logs"
clones=$(mktemp -d /tmp/hermes-rl-pythons-XXXXXX)
busy=()
trap 'kill "${busy[@]}" 2>/dev/null; rm -rf "$clones"' EXIT
for _ in 1 2 3 4; do
  (while :; do :; done) &
  busy+=($!)
done

failed=0
run() { # name command...
  local name=$1 begun=$SECONDS
  shift
  "$@" >"$logs/$name.log" 2>&1 || failed=1
  printf '%s: %s (%ss)\n' "$name" "$(grep -E '(passed|failed|error).* in ' "$logs/$name.log" | tail -1 || true)" $((SECONDS - begun))
}

for version in 3.11 3.12 3.13; do
  # pyenv's shims need a version to be chosen; those of its folder do not.
  python=$(compgen -G "$HOME/.pyenv/versions/$version.*/bin/python" | head -1 || true)
  python=${python:-$(command -v "python$version" || true)}
  [ -n "$python" ] || { echo "python$version: not here"; failed=1; continue; }
  clone=$clones/$version
  git clone --quiet . "$clone"
  run "root-$version" make -C "$clone" --no-print-directory PYTHON="$python" test-random TESTS="$*"
  run "user-$version" env PYTHON="$python" bash "$clone/tests/support/as_ordinary_user.sh" "${@:-tests}"
  rm -rf "$clone"
done
exit "$failed"
