#!/usr/bin/env bash
# Prepares what the container tests need (300 MB, two minutes, as root on Debian) under .tools: a small Debian root with
# Python, made by mmdebstrap, and gVisor's runsc from Debian's package. The docker engine is the machine's own
# (apt-get install docker.io). Then: pytest -m slow tests/live/containers
set -euo pipefail
tools="$(cd "$(dirname "$0")/../../.." && pwd)/.tools"
mkdir -p "$tools"
work="$(mktemp -d -p "$tools")"
trap 'rm -rf "$work"' EXIT

if [ ! -x "$tools/debian-root/usr/bin/python3" ]; then
    mmdebstrap --variant=minbase --include=python3,bash,coreutils,procps,util-linux bookworm "$work/root"
    rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/*
    mv "$work/root" "$tools/debian-root"
fi

if [ ! -x "$tools/runsc/usr/bin/runsc" ] && ! command -v runsc > /dev/null; then
    # The machine's own source, for the first suite that has the package.
    awk -v RS= 'NR == 1' /etc/apt/sources.list.d/debian.sources | sed 's/^Suites:.*/Suites: trixie/' > "$work/debian.sources"
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
    apt=(apt-get -q -o Dir::Etc::sourcelist="$work/debian.sources" -o Dir::Etc::sourceparts=/nonexistent
        -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache")
    "${apt[@]}" update
    (cd "$work" && "${apt[@]}" download runsc)
    dpkg -x "$work"/runsc_*.deb "$tools/runsc"
fi
