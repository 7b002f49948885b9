"""The documents are true: links lead somewhere, blocks run as they stand, and made pages are what the code says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from environments.config.settings import HermesAgentEnvConfig, RunConfig
from hermes_rl import RolloutRecord, load_environment
from sandbox_pool.config import LEVELS, rank
from sandbox_pool.conformance.runner import STRONGEST_WITHOUT
from support.doc_pages import FOLDER, PAGES
from support.markdown_pages import Block, anchors, blocks, links

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("environments", "agent_loop", "tool_parsers", "sandbox_pool")
FOLDERS = (*ROOMS, "hermes_rl", "configs", "docs", "examples", "tests")
LANGUAGES = {"", "bash", "python", "yaml", "toml", "json", "mermaid"}


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(ROOT / name for name in names if (ROOT / name).is_file())


EVERY_PAGE = tracked("*.md")
RUN = [page for page in EVERY_PAGE if (page.name == "README.md" and page.parent == ROOT) or "docs" in page.parts]
WITH_BLOCKS = [page for page in RUN if blocks(page)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = unquote(link).partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        place = (page.parent / target).resolve() if target else page
        assert place.exists(), f"{link}: {place} is not there"
        assert place.is_relative_to(ROOT), f"{link} leaves the repository"
        if anchor and place.suffix == ".md":
            assert anchor in anchors(place), f"{link}: no such heading in {name(place)}"


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name)
def test_every_path_that_is_named_is_there(page: Path) -> None:
    """Paths in code type that begin with a folder of ours; capitals in them stand for something of the reader's."""
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[a-z0-9_./-]*)`", page.read_text()):
        assert (ROOT / path).exists() or path == "environments/configs", path  # that one is only in the wheel


def test_every_page_of_docs_can_be_found_from_the_index() -> None:
    linked = {(FOLDER.parent / link.partition("#")[0]).resolve() for link in links(FOLDER.parent / "index.md")}
    assert [name(page) for page in RUN if "docs" in page.parts and page not in linked and page.name != "index.md"] == []


def run(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """As a reader would: `python` and `hermes-rl` are those of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "XDG_STATE_HOME": str(folder / "state")}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=180, check=False)


def run_blocks(page: Path, folder: Path) -> str:
    """Runs a page from top to bottom in one folder; what it printed."""
    printed = []
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text)
        elif block.language in ("bash", "python") and not block.not_run:
            words = ["bash", "-euc"] if block.language == "bash" else ["python", "-c"]
            done = run(folder, [*words, block.text])
            assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr[-3000:]}"
            printed.append(done.stdout)
    return "".join(printed)


@pytest.mark.ci
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", [page for page in WITH_BLOCKS if page.name != "README.md"], ids=name)
def test_the_blocks_of_a_page_run_as_they_stand(page: Path, tmp_path: Path) -> None:
    run_blocks(page, tmp_path)


@pytest.mark.timeout(400)
def test_the_example_of_the_readme_acts_and_scores(tmp_path: Path) -> None:
    printed = run_blocks(ROOT / "README.md", tmp_path)
    lines = (tmp_path / "runs" / "lines" / "rollouts.jsonl").read_bytes().splitlines()
    records = [RolloutRecord.from_json(line) for line in lines]
    assert len(records) == 8
    assert all(record.turns and record.has_tokens for record in records)
    assert any(record.tool_calls for record in records)
    scores = [record.score for record in records if record.score is not None]
    assert max(scores) == 1.0
    assert min(scores) < 1.0  # a group whose scores are all equal teaches nothing
    assert "8 rollouts, 8 with tokens" in printed


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name)
def test_blocks_are_written_in_their_language(page: Path, tmp_path: Path) -> None:
    """Those that cannot run here too: shell and Python must parse, and YAML must be settings that exist."""
    for block in blocks(page):
        assert block.language in LANGUAGES
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "bash":
            assert run(tmp_path, ["bash", "-nc", block.text]).returncode == 0, block.text
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "yaml":
            check_settings(block, tmp_path)


def check_settings(block: Block, folder: Path) -> None:
    data: dict[str, Any] = yaml.safe_load(block.text)
    if not set(data) <= set(RunConfig.model_fields):
        assert set(data) <= set(HermesAgentEnvConfig.model_fields), block.text
        data = {"env": data}
    config = {**data, "environment": "terminal_tasks"}  # settings of `env` in a page are everybody's or this one's
    (folder / "block.yaml").write_text(yaml.safe_dump(config))
    load_environment(folder / "block.yaml")


def test_the_folders_of_architecture_are_those_that_are_there() -> None:
    drawn = (ROOT / "ARCHITECTURE.md").read_text().partition("## The house\n")[2].partition("\nImports point")[0]
    named: set[str] = set()
    above: dict[int, str] = {}
    for line in filter(None, drawn.splitlines()):
        names = re.match(r" +((?:\w+/,? ?)+)", line)
        assert names is not None, line
        depth = (len(line) - len(line.lstrip())) // 2
        for folder in names[1].replace(",", " ").split():
            above[depth] = above.get(depth - 1, "") + folder if depth > 2 else folder
            named.add(above[depth])
    assert [folder for folder in sorted(named) if not (ROOT / folder).is_dir()] == []
    packages = {f"{path.parent.relative_to(ROOT)}/" for room in ROOMS for path in (ROOT / room).glob("*/__init__.py")}
    assert sorted(packages - named - {"tool_parsers/formats/", "tool_parsers/readers/"}) == []


def test_security_says_what_each_level_promises() -> None:
    rows = [line.split("|")[1:-1] for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| `")]
    said = {row[0].split("`")[1]: [word.strip().startswith("yes") for word in row[1:]] for row in rows if len(row) == 5}
    lacking = {need: rank(level) for need, (level, _) in STRONGEST_WITHOUT.items()}
    assert said == {need: [rank(level) < worst for level in LEVELS] for need, worst in lacking.items()}


@pytest.mark.parametrize("page", PAGES)
def test_pages_made_from_the_code_are_up_to_date(page: str) -> None:
    made = PAGES[page]()
    assert "|  |\n" not in made, "a field without a meaning: write its docstring, or a line in field_meanings.yaml"
    assert (FOLDER / page).read_text() == made, "run: python tests/support/doc_pages.py"
