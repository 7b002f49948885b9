"""The module that scripts import: it fits the schemas and runs on the oldest Python we promise."""

import ast
import inspect
import subprocess
import sys

import pytest

from agent_loop.tools.script.execute_code import describe, script_source, signature, stub_module
from agent_loop.tools.toolsets import CATALOG, resolve
from support.tools_pythons import find_python

SCRIPT_TOOLS = [tool for tool in CATALOG.values() if tool.script_parameters]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("terminal", "terminal(command, timeout=None, workdir=None)"),
        ("read_file", "read_file(path, offset=1, limit=500)"),
        ("write_file", "write_file(path, content)"),
        ("patch", "patch(path=None, old_string=None, new_string=None, replace_all=False, mode='replace', patch=None)"),
        (
            "search_files",
            (
                "search_files(pattern, target='content', path='.', file_glob=None, limit=50, offset=0,"
                " output_mode='content', context=0)"
            ),
        ),
        ("web_search", "web_search(query, limit=5)"),
        ("web_extract", "web_extract(urls)"),
    ],
)
def test_functions_have_the_signatures_that_scripts_know(name, form):
    assert signature(CATALOG[name]) == form


def test_scripts_cannot_call_scripts_processes_or_the_todo_list():
    assert {tool.name for tool in CATALOG.values()} - {tool.name for tool in SCRIPT_TOOLS} == {
        "execute_code", "process", "todo",
    }  # fmt: skip


def test_script_parameters_exist_in_the_schemas():
    for tool in SCRIPT_TOOLS:
        assert set(tool.script_parameters) <= set(tool.parameters["properties"])
        assert set(tool.parameters.get("required", ())) <= set(tool.script_parameters)


def test_the_module_has_the_enabled_tools_and_the_helpers_only():
    tools = [CATALOG[name] for name in resolve(["read_file", "terminal"]) if CATALOG[name].script_parameters]
    names = {node.name for node in ast.parse(stub_module(tools, "/s", "t")).body if isinstance(node, ast.FunctionDef)}
    assert {name for name in names if not name.startswith("_")} == {
        "read_file", "terminal", "json_parse", "shell_quote", "retry",
    }  # fmt: skip


def test_the_description_lists_what_there_is_or_says_that_there_is_nothing():
    assert describe([CATALOG["write_file"]]) == "  write_file(path, content) -> dict"
    assert "none" in describe([])


def load(python):
    """Import the generated module in another Python and call its helpers."""
    code = stub_module(SCRIPT_TOOLS, "/nowhere", "token") + inspect.cleandoc("""
        assert json_parse('\\ufeff{"a": "x\\ny"}') == {"a": "x\\ny"}
        assert shell_quote("a b'c") == "'a b'\\"'\\"'c'"
        tries = []
        def flaky():
            tries.append(1)
            if len(tries) < 3:
                raise ValueError("again")
            return "done"
        assert retry(flaky, delay=0) == "done"
        try:
            retry(lambda: 1 / 0, max_attempts=2, delay=0)
        except ZeroDivisionError:
            print("ok")
    """)
    return subprocess.run([python, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.13"])
def test_the_module_and_the_boot_code_run_on_old_and_new_pythons(version):
    python = find_python(version)
    if python is None:
        pytest.skip(f"needs Python {version}")
    done = load(python)
    assert (done.stdout, done.stderr) == ("ok\n", "")
    compiled = subprocess.run(
        [python, "-c", f"compile({script_source('boot.py')!r}, 'boot', 'exec')"], capture_output=True
    )
    assert compiled.returncode == 0, compiled.stderr


@pytest.mark.parametrize("version", ["2.7", "3.6"])
def test_a_python_that_is_too_old_says_so_by_its_exit_code(version):
    python = find_python(version)
    if python is None:
        pytest.skip(f"needs Python {version}")
    done = subprocess.run([python, "-c", script_source("boot.py")], stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == 86


def test_this_python_runs_it_too():
    assert load(sys.executable).stdout == "ok\n"
