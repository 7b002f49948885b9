"""Neutral comparator for the parser corpus (data for judging; own code).

verdict(record, content, calls, reasoning=None, strict=False) -> list of complaints ([] = pass)
  calls: list of (name, arguments) with arguments a JSON string or a parsed value.
By default only what the peer's test was shown to assert (see README, 'asserted') is judged;
strict=True judges every field against the peer's recorded output.
"""

import json


def _val(a):
    if isinstance(a, str):
        try:
            return json.loads(a)
        except ValueError:
            return a
    return a


def _norm(x):
    # 1 == 1.0 in JSON terms, but True != 1
    if isinstance(x, bool) or x is None or isinstance(x, str):
        return x
    if isinstance(x, (int, float)):
        return float(x) if abs(x) < 2**53 else x
    if isinstance(x, list):
        return [_norm(i) for i in x]
    if isinstance(x, dict):
        return {k: _norm(v) for k, v in x.items()}
    return x


def same(a, b):
    return json.dumps(_norm(a), sort_keys=True) == json.dumps(_norm(b), sort_keys=True)


def verdict(rec, content, calls, reasoning=None, strict=False):  # noqa: C901 (one rule per line, as published)
    a = rec.get("asserted")
    if strict or a is None:
        a = {
            "content": "exact" if strict else "none",
            "count": "both",
            "names": True,
            "args": "exact",
            "reasoning": strict,
        }
    if not strict and rec.get("strength") == "none":
        return []
    exp = rec["expected_tool_calls"]
    bad = []
    cnt = a.get("count", "both")
    if cnt in ("both", "min") and len(calls) < len(exp):
        bad.append(f"{len(calls)} calls, expected {len(exp)}")
    if cnt in ("both", "max") and len(calls) > len(exp):
        bad.append(f"{len(calls)} calls, expected {len(exp)}")
    for (n, ar), e in zip(calls, exp, strict=False):
        if a.get("names") and n != e["name"]:
            bad.append(f"name {n!r} != {e['name']!r}")
        if a.get("args", "none") != "none":
            want = e["arguments"] if "arguments_raw" not in e or e["arguments"] is not None else e["arguments_raw"]
            got = _val(ar)
            if got == "" and want == {}:
                got = {}
            if a["args"] == "exact":
                if not same(got, want):
                    bad.append(f"args {got!r} != {want!r}")
            elif isinstance(want, dict):  # noqa: SIM102
                if not isinstance(got, dict) or any(k not in got or not same(got[k], v) for k, v in want.items()):
                    bad.append(f"args {got!r} lack {want!r}")
    ec = rec["expected_content"] or ""
    gc = content or ""
    if a.get("content") == "exact" and ec != gc:
        bad.append(f"content {gc!r} != {ec!r}" + (" (whitespace only)" if ec.split() == gc.split() else ""))
    if a.get("content") == "loose" and ec.strip() != gc.strip():
        bad.append(f"content {gc!r} != {ec!r}")
    if a.get("reasoning") and rec.get("reasoning_parsed") and (rec["expected_reasoning"] or "") != (reasoning or ""):
        bad.append(f"reasoning {reasoning!r} != {rec['expected_reasoning']!r}")
    return bad
