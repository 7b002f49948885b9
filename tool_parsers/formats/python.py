"""Grammar G: Python-like calls."""

from __future__ import annotations

from tool_parsers.readers.python_calls import PythonCalls
from tool_parsers.spec import Format

FORMATS = (
    Format(
        "pythonic",
        PythonCalls(("<|python_start|>",), ("<|python_end|>",), bare=True),
        joined=True,
        trim="verbatim",
        models="Llama 3.2 pythonic, ToolACE",
    ),
    Format(
        "llama4_pythonic",
        PythonCalls(("<|python_start|>",), ("<|python_end|>",), bare=True),
        structure=("<|eom|>", "<|eot|>"),
        joined=True,
        trim="verbatim",
        models="Llama 4",
    ),
    Format("olmo3", PythonCalls(("<function_calls>",), ("</function_calls>",), bare=True), models="OLMo 3"),
    Format(
        "lfm2",
        PythonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
        aliases=("lfm2_5", "lfm"),
        trim="strip",
        models="LFM2, LFM2.5",
    ),
)
