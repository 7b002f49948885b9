"""Grammar H: Gemma's own literal."""

from __future__ import annotations

import re

from tool_parsers.readers.literal_calls import Literal
from tool_parsers.spec import Format, Reasoning

FORMATS = (
    Format(
        "gemma4",
        Literal(
            "<|tool_call>", "<tool_call|>", '<|"|>', bare_header=re.compile(r"(?m)^call:[A-Za-z_][\w.\-]{0,255}\{")
        ),
        aliases=("gemma_4", "gemma"),
        reasoning=Reasoning(
            ("<|channel><|channel>thought\n", "<|channel>thought\n", "<|channel>thought", "<|channel>"),
            ("<channel|>",),
            implicit_end=True,
        ),
        structure=("<channel|>", "<turn|>", "<|tool_response>"),
        trim="verbatim",
        models="Gemma 4",
    ),
    Format(
        "functiongemma",
        Literal("<start_function_call>", "<end_function_call>", "<escape>"),
        reasoning=None,
        structure=("<end_of_turn>", "<start_function_response>"),
        models="FunctionGemma",
    ),
)
