"""Grammar F: a name followed by key and value tags."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from tool_parsers.readers.pair_calls import Pairs
from tool_parsers.spec import THINK_IMPLICIT, Format, Reasoning
from tool_parsers.text import Text

_GLM = Pairs()

_SUFFIXED = re.compile(r"</?(?:tool_calls?|think|arg_key|arg_value)(:[0-9A-Za-z_\-]{1,32})>")


def with_suffix_of(text: Text) -> Format:
    """Hunyuan's markers carry a suffix per checkpoint (`<tool_call:6124c78e>`): take it from the text."""
    match = text.search(_SUFFIXED)
    return _hunyuan(match.group(1) if match else "")


@lru_cache(maxsize=64)
def _hunyuan(suffix: str) -> Format:
    def tags(name: str) -> tuple[str, str]:
        return f"<{name}{suffix}>", f"</{name}{suffix}>"

    opener, closer = tags("tool_call")
    think, end_think = tags("think")
    return Format(
        "hy_v3",
        Pairs(
            opener,
            closer,
            tags("arg_key"),
            tags("arg_value"),
            separator=f"<tool_sep{suffix}>",
            section_end=f"</tool_calls{suffix}>",
        ),
        reasoning=Reasoning(tuple({think, "<think>"}), tuple({end_think, "</think>"})),
        structure=tags("tool_calls"),
    )


FORMATS = (
    Format(
        "glm45", _GLM, aliases=("glm", "glm46", "glm4_moe", "glm4_5"), reasoning=THINK_IMPLICIT, models="GLM 4.5, 4.6"
    ),
    Format("glm47", _GLM, aliases=("glm5", "glm4_7", "glm47_moe"), reasoning=THINK_IMPLICIT, models="GLM 4.7, GLM 5"),
    Format("ling3", _GLM, aliases=("ling", "ling_3"), reasoning=THINK_IMPLICIT, models="Ling 3"),
    Format("poolside_v1", _GLM, aliases=("poolside", "laguna"), trim="verbatim", models="Poolside Laguna"),
    Format("spark25", _GLM, aliases=("spark2_5", "spark"), models="Spark 2.5"),
    Format(
        "iquest_q1",
        replace(_GLM, opener="<iquest_tool_call>", closer="</iquest_tool_call>"),
        aliases=("iquest",),
        models="IQuest Q1",
    ),
    Format("hy_v3", _GLM, aliases=("hunyuan_v3", "hy3"), adapt=with_suffix_of, models="Hunyuan 3"),
    Format(
        "hy_v4", _GLM, aliases=("hunyuan_v4", "hy4"), adapt=with_suffix_of, models="Hunyuan 4 (markers with a suffix)"
    ),
    Format(
        "k2_horizon",
        Pairs(
            "<ifm|tool_call>",
            "</ifm|tool_call>",
            ("<ifm|arg_key>", "</ifm|arg_key>"),
            ("<ifm|arg_value>", "</ifm|arg_value>"),
            kind=("<ifm|arg_type>", "</ifm|arg_type>"),
            json_body=True,
        ),
        aliases=("k2_v3", "k2"),
        reasoning=Reasoning(
            ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
            ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        ),
        structure=("<ifm|tool_calls>", "</ifm|tool_calls>"),
        joined=True,
        models="K2-Horizon",
    ),
)
