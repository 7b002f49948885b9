"""Speed of the parsers: single calls of 1 to 200 KB as MB/s, hostile inputs as time per MB and growth per doubling.

Run it from the top of the checkout: `python tests/benchmarks/bench_parsers.py [--quick] [NAME ...]`.
Times are processor time, best of three, so that a busy machine does not blur them.
"""

# ruff: noqa: E501 - markers and cases stand on one line each

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.parsers_writers import TOOLS, WRITERS
from tool_parsers import Parser, get_parser

HTML = '<div class="row">\n  <a href="/x?a=1&b=2">5 > 3 and "quoted"</a>\n</div>\n'
SIZES_KB = (1, 10, 50, 200)
MEGABYTE = 1 << 20


def repeated(unit: str, before: str = "", after: str = "") -> Callable[[int], str]:
    return lambda size: before + unit * (size // len(unit) + 1) + after


HOSTILE: dict[str, tuple[str, Callable[[int], str]]] = {
    "hermes: opener, blanks": ("hermes", repeated(" ", "<tool_call>")),
    "hermes: openers": ("hermes", repeated("<tool_call>")),
    "hermes: openers, braces": ("hermes", repeated("<tool_call>{")),
    "hermes: openers, open strings": ("hermes", repeated('<tool_call>{"name": "')),
    "hermes: cut string of escapes": ("hermes", repeated('<a href=\\"x\\">\\n', '<tool_call>{"name":"w","arguments":{"c":"')),
    "hermes: bottomless list": ("hermes", repeated("[", "<tool_call>")),
    "longcat: opener, blanks": ("longcat", repeated(" ", "<longcat_tool_call>")),
    "kimi_k2: arguments, blanks": ("kimi_k2", repeated(" ", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>")),
    "kimi_k2: call begins": ("kimi_k2", repeated("<|tool_call_begin|>")),
    "deepseek_v3: sections": ("deepseek_v3", repeated("<｜tool▁calls▁begin｜>")),
    "deepseek_v3: call begins": ("deepseek_v3", repeated("<｜tool▁call▁begin｜>")),
    "deepseek_v3: begin and sep": ("deepseek_v3", repeated("<｜tool▁call▁begin｜>function<｜tool▁sep｜>")),
    "deepseek_v31: begin and sep": ("deepseek_v31", repeated("<｜tool▁call▁begin｜>f<｜tool▁sep｜>")),
    "glm45: openers": ("glm45", repeated("<tool_call>")),
    "glm45: keys without values": ("glm45", repeated("<arg_key>a</arg_key>", "<tool_call>f\n")),
    "glm47: openers, values, no closers": ("glm47", repeated("<tool_call>f<arg_key>a</arg_key><arg_value>x")),
    "pythonic: many arguments": ("pythonic", repeated("a=1, ", "[f(", "b=2)]")),
    "pythonic: many arguments, cut": ("pythonic", repeated("a=1, ", "[f(")),
    "pythonic: open strings": ("pythonic", repeated('[f(a="')),
    "dots: opener, blanks": ("dots", repeated(" ", "<dots_function_call>")),
    "hy_v3: call and sep": ("hy_v3", repeated("<tool_call>a<tool_sep>")),
    "qwen3_coder: short arguments": ("qwen3_coder", repeated("<parameter=a>\n1\n</parameter>\n", "<tool_call>\n<function=f>\n", "</function>\n</tool_call>")),
    "step3p5: short arguments": ("step3p5", repeated("<parameter=a>\n1\n</parameter>\n", "<tool_call>\n<function=f>\n", "</function>\n</tool_call>")),
    "glm47: short arguments": ("glm47", repeated("<arg_key>ab</arg_key><arg_value>v</arg_value>", "<tool_call>f", "</tool_call>")),
    "gemma4: short arguments": ("gemma4", repeated("abc:1,", "<|tool_call>call:f{", "d:1}<tool_call|>")),
    "qwen3_coder: function openers": ("qwen3_coder", repeated("<tool_call><function=f>")),
    "qwen3_coder: closers in a value": ("qwen3_coder", repeated("</parameter>x", "<tool_call><function=f><parameter=a>")),
    "deepseek_v32: open bodies": ("deepseek_v32", repeated('<｜DSML｜invoke name="a">{"x')),
    "minimax_m3: open elements": ("minimax_m3", repeated(']<]minimax[>[<invoke name="f">]<]minimax[>[<a>')),
    "mistral: markers": ("mistral", repeated("[TOOL_CALLS]")),
    "mistral: open arguments": ("mistral", repeated('[TOOL_CALLS]f[ARGS]{"a": "')),
    "llama3_json: nested names": ("llama3_json", repeated('{"name":')),
    "harmony: open calls": ("harmony", repeated('<|channel|>commentary to=functions.f<|message|>{"a')),
    "auto: openers": ("auto", repeated("<tool_call>")),
}  # fmt: skip


def seconds(parser: Parser, text: str) -> float:
    best = float("inf")
    for _ in range(3):
        before = time.process_time()
        parser.parse(text, TOOLS)
        best = min(best, time.process_time() - before)
        if best > 1:
            break
    return max(best, 1e-6)


def single_calls(wanted: list[str]) -> None:
    print("| format | " + " | ".join(f"{size} KB" for size in SIZES_KB) + " | (ms; last column MB/s at 200 KB)")
    print("|---" * (len(SIZES_KB) + 2) + "|")
    for writer in WRITERS:
        if wanted and writer.parser not in wanted:
            continue
        times = []
        for size in SIZES_KB:
            content = HTML * (size * 1024 // len(HTML))
            times.append(
                seconds(get_parser(writer.parser), writer.write([("write_file", {"path": "a", "content": content})]))
            )
        cells = " | ".join(f"{1000 * spent:.2f}" for spent in times)
        print(f"| {writer.parser} | {cells} | {SIZES_KB[-1] / 1024 / times[-1]:.0f} |")


def hostile(wanted: list[str], largest: int) -> None:
    print("\n| hostile input | parser | 1/4 | 1/2 | whole | ms per MB | growth per doubling |")
    print("|---" * 7 + "|")
    for name, (parser, make) in HOSTILE.items():
        if wanted and parser not in wanted:
            continue
        times = [seconds(get_parser(parser), make(size)) for size in (largest // 4, largest // 2, largest)]
        growth = (times[2] / times[0]) ** 0.5
        cells = " | ".join(f"{1000 * spent:.1f}" for spent in times)
        print(f"| {name} | {parser} | {cells} | {1000 * times[2] * MEGABYTE / largest:.0f} | {growth:.2f} |")


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if not word.startswith("-")]
    single_calls(names)
    hostile(names, MEGABYTE // 4 if "--quick" in sys.argv else MEGABYTE)
