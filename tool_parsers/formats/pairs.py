"""Grammar F: a name followed by key and value tags."""

from __future__ import annotations

from dataclasses import replace

from tool_parsers.readers.pairs import Pairs
from tool_parsers.spec import THINK_IMPLICIT, Format, Reasoning

_GLM = Pairs()

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
    Format(
        "hy_v3",
        replace(_GLM, separator="<tool_sep>"),
        aliases=("hunyuan_v3", "hy3"),
        structure=("<tool_calls>", "</tool_calls>"),
        models="Hunyuan 3",
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
