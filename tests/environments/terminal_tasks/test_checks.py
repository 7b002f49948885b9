from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
import zlib
from pathlib import Path

import pytest

from environments.scoring.verification import SetupFailed
from environments.terminal_tasks.checks import (
    Check,
    EntriesAre,
    FileIs,
    GzipHolds,
    JsonIs,
    JsonLinesAre,
    KindIs,
    LinesAre,
    LinkFollows,
    Missing,
    ModeIs,
    NumberIs,
    ScriptPrints,
    TarHolds,
)
from environments.terminal_tasks.git_checks import BranchIs, CommitIs
from environments.terminal_tasks.terminal_task import TerminalTask
from support.local_context import LocalContext


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("one  \ntwo\n\n")
    (tmp_path / "n.txt").write_text("12 a.txt\n")
    (tmp_path / "paths.txt").write_text("./b/c\n./a\n")
    (tmp_path / "x.json").write_text('{"b": [1, 2], "a": 1.0}')
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "run.sh").write_text('#!/bin/sh\necho "got $1"; exit 3\n')
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "inner").write_text("")
    (tmp_path / "link").symlink_to("a.txt")
    (tmp_path / "a.txt").chmod(0o640)
    return tmp_path


HOLDS: list[Check] = [
    FileIs("a.txt", "one\ntwo"),
    FileIs("a.txt", "one  \ntwo\n\n", exact=True),
    NumberIs("n.txt", 12),
    LinesAre("paths.txt", ("a", "b/c")),
    JsonIs("x.json", '{"a": 1, "b": [1, 2]}'),
    JsonLinesAre("x.jsonl", ('{"a": 1}', '{"a": 2}')),
    KindIs("d", "dir"),
    KindIs("link", "symlink"),
    Missing("nowhere"),
    ModeIs("a.txt", 0o640),
    ModeIs("a.txt", 0o040, mask=0o070),
    EntriesAre("d", ("inner",)),
    LinkFollows("link", "a.txt"),
    ScriptPrints("run.sh", ("it's $HOME",), "got it's $HOME", exit_code=3),
]
FAILS: list[tuple[Check, str]] = [
    (FileIs("a.txt", "one"), "instead of"),
    (FileIs("a.txt", "one\ntwo", exact=True), "instead of"),
    (FileIs("d", ""), "is not a file"),
    (FileIs("link", "one\ntwo"), "is not a file"),
    (NumberIs("n.txt", 1), "instead of 1"),
    (NumberIs("a.txt", 1), "instead of 1"),
    (NumberIs("nowhere", 1), "is not a file"),
    (LinesAre("paths.txt", ("a",)), "lists"),
    (LinesAre("nowhere", ()), "is not a file"),
    (JsonIs("a.txt", "1"), "is not JSON"),
    (JsonIs("x.json", "{}"), "holds"),
    (JsonLinesAre("x.jsonl", ('{"a": 2}', '{"a": 1}')), "holds"),
    (JsonLinesAre("a.txt", ()), "not JSON"),
    (KindIs("d", "file"), "is not a file"),
    (Missing("d"), "still there"),
    (ModeIs("a.txt", 0o644), "mode 640 instead of 644"),
    (ModeIs("nowhere", 0o644), "missing"),
    (EntriesAre("d", ()), "holds 'inner'"),
    (EntriesAre("a.txt", ()), "is not a directory"),
    (LinkFollows("a.txt", "n.txt"), "is not a symlink"),
    (LinkFollows("link", "n.txt"), "does not lead to"),
    (LinkFollows("link", "nowhere"), "missing"),
    (ScriptPrints("run.sh", ("x",), "got x"), "exits 3 instead of 0"),
    (ScriptPrints("run.sh", ("x",), "got y", exit_code=3), "prints"),
    (ScriptPrints("run.sh", ("x",), "got x", exit_code=3, direct=True), "exits 126"),
    (GzipHolds("a.txt", ""), "not gzip"),
    (GzipHolds("nowhere", ""), "is not a file"),
    (TarHolds("a.txt", (), compressed=False), "not a tar"),
    (TarHolds("nowhere", (), compressed=True), "is not a file"),
    (BranchIs("d", "main"), "on no branch"),
    (CommitIs("d", "refs/heads/main"), "has no refs/heads/main"),
]


@pytest.mark.parametrize("check", HOLDS, ids=repr)
async def test_a_promise_that_is_kept_has_no_failure(check: Check, root: Path) -> None:
    assert await check.failure(LocalContext(root)) is None


@pytest.mark.parametrize(("check", "sentence"), FAILS, ids=repr)
async def test_a_broken_promise_is_named(check: Check, sentence: str, root: Path) -> None:
    assert sentence in (await check.failure(LocalContext(root)) or "")


async def test_an_archive_with_one_file_more_or_other_compression_fails(tmp_path: Path) -> None:
    ctx = LocalContext(tmp_path)
    await ctx.exec("printf a > a; printf b > b; tar czf x.tgz ./a b")
    assert await TarHolds("x.tgz", (("a", "a"), ("b", "b")), compressed=True).failure(ctx) is None
    assert await TarHolds("x.tgz", (("a", "a"),), compressed=True).failure(ctx)
    assert await TarHolds("x.tgz", (("a", "a"), ("b", "b")), compressed=False).failure(ctx)


async def test_a_truncated_archive_is_no_archive(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        info = tarfile.TarInfo("big")
        info.size = 100_000
        archive.addfile(info, io.BytesIO(os.urandom(100_000)))
    (tmp_path / "cut.tgz").write_bytes(buffer.getvalue()[:50_000])
    assert "not a gzip" in (await TarHolds("cut.tgz", (), compressed=True).failure(LocalContext(tmp_path)) or "")


def git(root: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(
        ["git", *identity, *words], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "r"
    (root / "sub").mkdir(parents=True)
    git(root, "init", "-q", "-b", "main")
    for n in (1, 2):
        (root / "sub" / "f").write_text(f"{n}\n")
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", f"c{n}")
    return root


async def test_commits_trees_annotated_tags_and_packed_refs_are_read_without_git(repo: Path) -> None:
    git(repo, "tag", "-a", "v1", "-m", "tag", "HEAD~1")
    git(repo, "pack-refs", "--all")
    ctx = LocalContext(repo.parent)
    wanted = CommitIs("r", "HEAD", (("sub/f", "2\n"),), message="c2", earlier=("c1",), merges=1)
    assert await wanted.failure(ctx) is None
    assert await CommitIs("r", "refs/tags/v1", (("sub/f", "1\n"),), message="c1", earlier=()).failure(ctx) is None
    assert await CommitIs("r", "HEAD", (("sub/f", "2"),)).failure(ctx) is None
    assert await BranchIs("r", "main").failure(ctx) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"message": "c3"}, "says 'c2'"),
        ({"earlier": ()}, "another history"),
        ({"merges": 2}, "has 1 parents"),
        ({"files": (("sub/f", "1\n"),)}, "other files"),
    ],
)
async def test_each_difference_of_a_commit_is_named(repo: Path, change: dict, sentence: str) -> None:
    check = CommitIs("r", "refs/heads/main", **change)
    assert sentence in (await check.failure(LocalContext(repo.parent)) or "")


async def test_forged_and_damaged_objects_are_refused(repo: Path) -> None:
    commit = git(repo, "rev-parse", "HEAD")
    stored = repo / ".git" / "objects" / commit[:2] / commit[2:]
    stored.chmod(0o644)
    body = b"tag 100\0object " + commit.encode() + b"\n\nendless"
    stored.write_bytes(zlib.compress(body))
    ctx = LocalContext(repo.parent)
    assert "forged" in (await CommitIs("r", "HEAD").failure(ctx) or "")
    stored.write_bytes(b"junk")
    assert "damaged" in (await CommitIs("r", "HEAD").failure(ctx) or "")
    stored.unlink()
    assert "no loose object" in (await CommitIs("r", "HEAD").failure(ctx) or "")


async def test_a_set_up_that_fails_is_a_fault_of_the_task_not_a_score(tmp_path: Path) -> None:
    task = TerminalTask("terminal:train:x:1", "x", "c", 0, "train", False, "p", (), ("echo broken; exit 3",), (), ())
    with pytest.raises(SetupFailed, match="exits 3: broken"):
        await task.prepare(LocalContext(tmp_path))


def store(repo: Path, kind: str, body: bytes) -> str:
    """A loose object, written as git does."""
    data = f"{kind} {len(body)}".encode() + b"\0" + body
    name = hashlib.sha1(data).hexdigest()
    path = repo / ".git" / "objects" / name[:2] / name[2:]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(zlib.compress(data))
    return name


async def test_endless_trees_and_refs_that_are_not_names_are_the_agents_failure(repo: Path) -> None:
    tree = store(repo, "blob", b"x")
    for _ in range(1200):
        tree = store(repo, "tree", b"40000 d\0" + bytes.fromhex(tree))
    commit = store(repo, "commit", f"tree {tree}\n\nc\n".encode())
    head = repo / ".git" / "refs" / "heads" / "main"
    check = CommitIs(repo.name, "refs/heads/main", files=())
    ctx = LocalContext(repo.parent)
    for content in (commit, "a\0b", "../../../../etc/passwd", "é" * 40):
        head.write_text(content)
        assert await check.failure(ctx) is not None
    (repo / ".git" / "HEAD").write_bytes(b"ref: refs/heads/a\0b\n")
    assert "is on no branch" in str(await BranchIs(repo.name, "main").failure(ctx))
    assert "is on no branch" in str(await CommitIs(repo.name, "HEAD").failure(ctx))
