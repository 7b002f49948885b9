"""The command line: fast, one sentence per mistake, exit code 2."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import environments
from environments.apps.cli.main import VERBS, load_verb, main
from environments.config.flags import split_settings


def call(capsys, *words):
    code = main(words)
    return code, capsys.readouterr()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_line_and_a_worked_example(verb, capsys):
    module = load_verb(verb)
    assert len(VERBS[verb].splitlines()) == 1
    assert module.EXAMPLE.startswith(f"hermes-rl {verb}") or f"hermes-rl {verb}" in module.EXAMPLE
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert module.EXAMPLE.splitlines()[0] in capsys.readouterr().out


def test_help_lists_every_verb(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in VERBS)


@pytest.mark.parametrize("words", [["nope"], [], ["doctor", "--nope"], ["doctor", "--env.group_size", "4"]])
def test_bad_input_is_one_sentence_and_exit_code_2(words, capsys):
    code, printed = call(capsys, *words)
    assert code == 2
    assert printed.out == ""
    assert printed.err.startswith("hermes-rl: ")
    assert len(printed.err.strip().splitlines()) == 1


def test_dotted_flags_are_taken_out_with_their_values():
    words, settings = split_settings(["serve", "x", "--env.a", "-1", "--json", "--b.c=d e", "--pool.x", "--flag"])
    assert words == ["serve", "x", "--json", "--flag"]
    assert settings == ["--env.a", "-1", "--b.c=d e", "--pool.x"]


def test_help_imports_nothing_heavy():
    heavy = "{'atroposlib', 'transformers', 'openai', 'aiohttp', 'numpy', 'torch', 'wandb', 'rich.console', 'pydantic'}"
    code = (
        "import sys\nfrom environments.apps.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        f"loaded = {heavy} & set(sys.modules)\nassert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_no_crash():
    command = f"{sys.executable} -m environments.apps.cli.main doctor --json | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_version_is_the_installed_one(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hermes-rl {version('hermes-rl')}\n"


def test_no_program_lets_rich_paint_what_looks_like_a_number_or_a_name() -> None:
    """It takes bright colours for that, which a light terminal swallows."""
    package = Path(environments.__file__).parent
    painted = [
        f"{path.relative_to(package)}: {made}"
        for path in package.rglob("*.py")
        for made in re.findall(r"\bConsole\([^()]*(?:\([^()]*\)[^()]*)*\)", path.read_text("utf-8"))
        if "highlight=False" not in made and "file=" not in made
    ]
    assert painted == []
