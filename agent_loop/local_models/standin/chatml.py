"""A small byte-level ChatML tokenizer, trained in milliseconds on corpus.txt: nothing is downloaded.

Like Qwen's: end-of-turn is a special token, tool and thinking tags are single tokens that are not special.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from agent_loop.model.tokens.template import Tokenizer

VOCABULARY = 1500
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def chatml_template() -> str:
    """The ChatML template with Hermes tool calls that comes with this package."""
    return resources.files(__package__).joinpath("chatml.jinja").read_text("utf-8")


def chatml_tokenizer() -> Tokenizer:
    """The tokenizer as transformers wants it, with its chat template; one per process."""
    return cast("Tokenizer", _build())


@lru_cache(maxsize=1)
def _build() -> Any:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as FastTokenizer
    from transformers import PreTrainedTokenizerFast

    text = resources.files(__package__).joinpath("corpus.txt").read_text("utf-8")
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    built.chat_template = chatml_template()
    return built
