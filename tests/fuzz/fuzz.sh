#!/usr/bin/env bash
# libFuzzer with ASan and UBSan on the readers of the C helper: fuzz.sh SECONDS, shared by the targets. 0 plays the corpus
# only. What it finds is left in the current folder and said.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
helper="$here/../../sandbox_pool/server/helper"
command -v clang >/dev/null || { echo "fuzzing needs clang (apt-get install clang libclang-rt-dev)"; exit 77; }
work="$(mktemp -d)"
trap 'rm -rf "$work" /tmp/hermes-fuzz-*' EXIT
declare -A sources=([message]="message.c" [archive]="util.c")
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
for target in message archive; do
  files=(); for file in ${sources[$target]}; do files+=("$helper/$file"); done
  clang -g -O1 -std=gnu11 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I"$helper" \
    -o "$work/$target" "$here/fuzz_$target.c" "${files[@]}"
  mkdir "$work/$target.corpus"
  limits=(-max_len=8192 -timeout=20 -handle_xfsz=0 -rss_limit_mb=2048 -print_final_stats=1 "-artifact_prefix=$target-")
  if [ "$1" = 0 ]; then "$work/$target" "${limits[@]}" -runs=0 "$here/corpus/$target"
  else
    "$work/$target" "${limits[@]}" "-max_total_time=$(( ($1 + 1) / 2 ))" "$work/$target.corpus" "$here/corpus/$target"
  fi
done
echo "fuzzing found nothing"
