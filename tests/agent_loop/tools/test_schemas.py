"""The schemas are what models trained on hermes-agent know. A change of them must be seen: `golden/schemas.json`.

To accept one: `python tests/agent_loop/tools/test_schemas.py`.
"""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from agent_loop.tools.toolsets import CATALOG

GOLDEN = Path(__file__).parent / "golden" / "schemas.json"
KNOWN = {
    "terminal": ["command", "background", "timeout", "workdir", "pty", "notify_on_complete", "watch_patterns"],
    "process": ["action", "session_id", "data", "timeout", "offset", "limit"],
    "read_file": ["path", "offset", "limit"],
    "write_file": ["path", "content"],
    "patch": ["mode", "path", "old_string", "new_string", "replace_all", "patch"],
    "search_files": ["pattern", "target", "path", "file_glob", "limit", "offset", "output_mode", "context"],
    "execute_code": ["code"],
    "todo": ["todos", "merge"],
    "web_search": ["query", "limit"],
    "web_extract": ["urls"],
}


def current():
    return {name: tool.openai_schema() for name, tool in CATALOG.items()}


def test_the_schemas_are_the_golden_ones():
    assert current() == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_names_and_parameters_are_the_known_ones(name):
    assert list(CATALOG[name].parameters["properties"]) == KNOWN[name]


def test_there_are_no_other_tools():
    assert sorted(CATALOG) == sorted(KNOWN)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_every_schema_is_valid_and_describes_every_parameter(name):
    schema = CATALOG[name].schema
    Draft202012Validator.check_schema(schema["parameters"])
    assert schema["description"]
    assert all(parameter.get("description") for parameter in schema["parameters"]["properties"].values())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(current(), indent=2, ensure_ascii=False) + "\n")
