# Sourced by prepare.sh of a folder of tests/live, which sets `name`: an environment of its own under .tools/NAME, with
# this checkout in it, so that the pins of others never meet ours. Made once; remove .tools/NAME to make it again.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
home="$root/.tools/$name"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
for versions in "${HOME:-/root}"/.pyenv/versions/3.12*/bin; do
  [ -d "$versions" ] && PATH="$versions:$PATH" # pyenv hides the versions that are not the chosen one
done
mkdir -p "$home"
if [ -f "$home/ready" ]; then exit 0; fi

# made FOLDER PYTHON OURS THEIRS...: an environment with their packages, and this checkout with its extras (OURS is '.' or
# '.[...]', or nothing for theirs alone). Theirs come first and without our config, whose overrides leave out packages that they need.
made() {
  local folder="$1" version="$2" ours="$3"
  shift 3
  uv venv -q --clear --python "$version" "$folder"
  uv pip install -q --no-config --python "$folder/bin/python" "$@"
  [ -z "$ours" ] || (cd "$root" && uv pip install -q --python "$folder/bin/python" -e "$ours")
}

# SmolLM2 in Hugging Face form, $home/smollm2, written by a newer transformers than some trainers take.
smollm2() {
  local writer="$root/.tools/writer"
  if [ ! -f "$writer/ready" ]; then
    made "$writer" 3.11 '.[cpu-model]' "torch==2.13.0" accelerate
    "$writer/bin/hermes-rl" model get >/dev/null
    touch "$writer/ready"
  fi
  "$writer/bin/python" - "$home/smollm2" <<'PY'
import sys
from pathlib import Path

from agent_loop.local_models.cpu_model.weights import smollm2_gguf
from environments.trainers.cpu_weights import hugging_face_copy

hugging_face_copy(smollm2_gguf(), Path(sys.argv[1]))
PY
}
