#!/usr/bin/env python3
"""One reward for each part of the merge, and `reward` for the whole."""
import json

wanted = {"name": "app", "log": {"level": "debug", "file": "app.log"}, "ports": [8080]}
try:
    with open("merged.json") as file:
        found = json.load(file)
except (OSError, ValueError):
    found = {}
parts = {key: int(isinstance(found, dict) and found.get(key) == value) for key, value in wanted.items()}
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": sum(parts.values()) / len(parts), **parts}, file)
