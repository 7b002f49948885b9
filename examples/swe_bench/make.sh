#!/usr/bin/env bash
# Builds the images of the two repositories as OCI folders: make.sh FOLDER [BASE.tar]. As root, with mmdebstrap, buildah and
# skopeo; nothing is taken from a registry. Then:
#   hermes-rl oracle swe_bench --env.dataset examples/swe_bench/rows.jsonl --env.image 'oci:FOLDER/{instance_id}:1'
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
mkdir -p "$1"
out="$(cd "$1" && pwd)"
base="${2:-$out/base.tar}"
[ -f "$base" ] || mmdebstrap --variant=minbase --include=python3,python3-pytest,git,procps bookworm "$base"
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
build() { buildah --root "$out/storage" --runroot "$out/run" "$@"; }
made="$(build from scratch)"
build add -q "$made" "$base" / > /dev/null
build config --cmd /bin/bash --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$made"
build commit -q --rm "$made" localhost/hermes-rl-swe-base > /dev/null
for repo in slugs intervals; do
  build bud -q -t "localhost/hermes-rl-swe/$repo:1" "$here/$repo" > /dev/null
  build push -q "localhost/hermes-rl-swe/$repo:1" "oci:$out/hermes-rl__$repo-1:1"
done
rm -rf "$out/storage" "$out/run"
