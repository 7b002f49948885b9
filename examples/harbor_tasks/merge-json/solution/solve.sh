#!/bin/bash
set -e
python3 - <<'END'
import json
def merged(a, b):
    if isinstance(a, dict) and isinstance(b, dict):
        return {key: merged(a[key], b[key]) if key in a and key in b else b.get(key, a.get(key)) for key in {**a, **b}}
    return b
with open("merged.json", "w") as file:
    json.dump(merged(json.load(open("base.json")), json.load(open("local.json"))), file)
END
