"""The published templates with the special tokens that their models have, and the tokenizer each runs on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from support.chat_templates import template_files
from support.real_tokenizers import real_tokenizer

SPECIAL = re.compile(
    r"<\|[^|<>\s{}']{1,40}\|>|<｜[^｜<>{}]{1,40}｜>|\[/?[A-Z_]{3,30}\]|</?s>|<[a-z]+_of_[a-z]+>"
    r"|<\|[^|<>\s{}']{1,40}>|<[^|<>\s{}'/]{1,40}\|>|\]<\][a-z]+\[>\["
)
"""How special tokens look in most templates."""
MORE_SPECIAL = {
    "MiniMax-M2": ["[e~[", "]~b]", "]~!b["],
    "MiniMax-M3": ["[e~[", "]~b]", "]~!b["],
    "NVIDIA-Nemotron-Nano-v2": ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"],
    "Reka-Edge": ["<sep>"],
    "poolside-Laguna-S-2.1": ["</assistant>", "<assistant>"],
    "poolside-Laguna-XS-2.1": ["</assistant>", "<assistant>"],
    "poolside-Laguna-XS.2": ["</assistant>", "<assistant>"],
    "ByteDance-Seed-OSS": ["<seed:bos>", "<seed:eos>"],
    "inclusionai-ling-3.0-flash": ["<role>", "</role>"],
    "tencent-Hy3": [f"<｜hy_{name}:opensource｜>" for name in ("eos", "begin_of_sentence", "User", "Assistant")],
}
"""Those that look like nothing in particular."""
EOS = {
    "Apriel": "<|end|>",
    "Cohere": "<|END_OF_TURN_TOKEN|>",
    "GLM": "<|endoftext|>",
    "Hy3": "<｜hy_eos:opensource｜>",
    "Llama-3": "<|eot_id|>",
    "MiniMax-M2": "[e~[",
    "MiniMax-M3": "[e~[",
    "Ministral": "</s>",
    "Mistral": "</s>",
    "Phi": "<|end|>",
    "Seed": "<seed:eos>",
    "gpt-oss": "<|return|>",
    "mistral": "</s>",
}
"""The models' own EOS where the template does not show it; for the rest the recorder finds the turn's end itself."""
FAMILIES = {"Qwen": "qwen", "Llama": "llama3", "deepseek": "deepseek", "Smol": "smollm2"}
TOKENIZERS = ("qwen", "llama3", "deepseek", "smollm2")


@dataclass(frozen=True)
class TemplateCase:
    """One published template."""

    name: str
    source: str

    @property
    def natural_tokenizer(self) -> str:
        """The tokenizer of its family, or one of the four in turn."""
        for part, tokenizer in FAMILIES.items():
            if part in self.name:
                return tokenizer
        return TOKENIZERS[sum(self.name.encode()) % len(TOKENIZERS)]

    def tokenizer(self, family: str | None = None):
        """A real tokenizer that knows the special tokens; shared between templates, so use one case at a time."""
        tokenizer = real_tokenizer(family or self.natural_tokenizer, all_special())
        tokenizer.bos_token = "<BOS>"
        tokenizer.eos_token = next((token for part, token in EOS.items() if part in self.name), None)
        return tokenizer


@cache
def all_special() -> tuple[str, ...]:
    """The special tokens of all templates together: one that a template never writes changes nothing for it."""
    written = {token for case in template_cases() for token in SPECIAL.findall(case.source)}
    written |= {"<BOS>", *EOS.values()}
    return tuple(sorted(written | {t for tokens in MORE_SPECIAL.values() for t in tokens}))


@cache
def template_cases() -> list[TemplateCase]:
    """All of them; skips the calling test when they cannot be fetched."""
    return [TemplateCase(Path(path).stem, path.read_text("utf-8")) for path in template_files()]
