"""Pieces put together again are the text, byte for byte, whatever the tokenizer."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_loop.local_models.standin import chatml_tokenizer
from agent_loop.model.tokens.ledger import Vocabulary
from agent_loop.model.tokens.template import decode_ids
from support.real_tokenizers import real_tokenizer

TEXT = '<|im_start|>system\nnaïve 日本語 🎉\n\tdef f(a):  return "x"<|im_end|>\n  '


def joined(tokenizer, ids: list[int]) -> bytes:
    pieces = Vocabulary(tokenizer).pieces(ids)
    return b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in (pieces[str(i)] for i in ids))


@pytest.mark.parametrize("name", ["standin", "smollm2", "qwen", "llama3", "deepseek"])
def test_pieces_are_the_text(name: str) -> None:
    tokenizer = chatml_tokenizer() if name == "standin" else real_tokenizer(name)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert joined(tokenizer, ids).decode() == decode_ids(tokenizer, ids)


def test_words_and_bytes_of_a_sentencepiece_vocabulary_are_read() -> None:
    words = {"<unk>": 0, "▁a": 1, "b": 2, "<0xE2>": 3, "<0x98>": 4, "<0x83>": 5, "▁": 6}
    core = Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    assert joined(tokenizer, [1, 2, 6, 3, 4, 5]).decode() == " ab ☃"
    assert Vocabulary(tokenizer).pieces([3]) == {"3": [0xE2]}
