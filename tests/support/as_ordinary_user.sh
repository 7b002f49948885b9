#!/usr/bin/env bash
# Started by root: runs what differs for an ordinary user as one, in random order, in a clone and a venv of his own.
set -euo pipefail
cd "$(dirname "$0")/../.."

user=hermes-rl-tester
[ $# -gt 0 ] || set -- tests/sandbox_pool tests/conformance tests/attacks tests/faults tests/environments/test_base.py

[ "$(id -u)" = 0 ] || { echo "make test-user needs root; as an ordinary user, make test is this test"; exit 2; }
id "$user" >/dev/null 2>&1 && { echo "there is a user $user already: another such run, or the rest of one"; exit 2; }

home=$(mktemp -d /tmp/hermes-rl-user-XXXXXX)
rm -rf "/tmp/pytest-of-$user" # of an earlier user of this name and another number
trap 'rm -rf "$home" "/tmp/pytest-of-$user"; userdel --force "$user" 2>/dev/null || true' EXIT
useradd --no-create-home --home-dir "$home" --shell /bin/bash "$user"
chown "$user:" "$home"
as_user() { (cd "$home" && runuser -u "$user" -- env HOME="$home" USER="$user" PATH=/usr/local/bin:/usr/bin:/bin "$@"); }

works() { as_user "$1" -c 'import ensurepip, ssl, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
python=""
for candidate in ${PYTHON:+"$PYTHON" "$(basename "$(readlink -f "$PYTHON")")"} ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
  works "$candidate" && python=$candidate && break
done
if [ -z "$python" ] && [ -n "${PYTHON:-}" ]; then # in root's own folder, which nobody else may enter
  cp -a "$("$PYTHON" -c 'import sys; print(sys.base_prefix)')" "$home/python"
  works "$home/python/bin/python3" && python=$home/python/bin/python3
fi
[ -n "$python" ] || { echo "no Python 3.11 to 3.13 with venv that $user can run"; exit 2; }

mkdir "$home/clone"
git archive HEAD | tar -x -C "$home/clone"
chown -R "$user:" "$home/clone"
as_user git -C clone init --quiet
as_user git -C clone add --all
as_user make -C clone --no-print-directory PYTHON="$python" WORKERS=2 ${SEED:+SEED="$SEED"} test-random TESTS="$*"
