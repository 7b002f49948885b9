#!/usr/bin/env bash
# Prepares the docker engine for tests/live/docker under .tools/docker (200 MB, half a minute, as root on Debian): Debian's
# dockerd, containerd and tini, unpacked and not installed. runc and podman are the machine's own (apt-get install runc podman).
# With `--base` also a Debian with Python, git, ripgrep and node by mmdebstrap (360 MB, some minutes), as a base of our image.
set -euo pipefail
tools="$(cd "$(dirname "$0")/../../.." && pwd)/.tools/docker"
mkdir -p "$tools"
work="$(mktemp -d -p "$tools")"
trap 'rm -rf "$work"' EXIT

if [ ! -x "$tools/usr/sbin/dockerd" ]; then
    (cd "$work" && chmod 755 . && apt-get download -qq docker.io containerd tini)
    for package in "$work"/*.deb; do dpkg -x "$package" "$tools"; done
fi

if [ "${1:-}" = --base ] && [ ! -f "$tools/base.tar" ]; then
    mmdebstrap --variant=minbase --include=python3,procps,git,ripgrep,nodejs,ca-certificates bookworm "$work/base.tar"
    mv "$work/base.tar" "$tools/base.tar"
fi
