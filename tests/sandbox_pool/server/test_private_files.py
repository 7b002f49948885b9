"""What strangers may not read gets a whiteout in the view, also when it appears, and only as long as it is so."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_pool.server.isolation import private_files
from sandbox_pool.server.isolation.private_files import PrivateFiles


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "opt/app").mkdir(parents=True)
    (root / "usr/share/x/y").mkdir(parents=True)
    (root / "opt/app/early").touch(0o600)
    (root / "opt/app/open").touch()
    (root / "opt/closed").mkdir(0o700)
    return root


@pytest.fixture
def private(root: Path, tmp_path: Path) -> Iterator[PrivateFiles]:
    (tmp_path / "slot").mkdir()
    made = PrivateFiles(str(tmp_path), ["opt", "usr"], str(root))
    yield made
    made.close()


def hidden(tmp_path: Path) -> list[str]:
    found = [path for path in (tmp_path / "slot").rglob("*") if stat.S_ISCHR(path.lstat().st_mode)]
    return sorted(str(path.relative_to(tmp_path / "slot")) for path in found)


EARLY = ["opt/app/early", "opt/closed"]


def test_what_is_there_at_the_start(private: PrivateFiles, tmp_path: Path) -> None:
    assert hidden(tmp_path) == EARLY
    assert private.hide_new() == private.hide_new() == 0


@pytest.mark.parametrize(
    "place", ["opt", "opt/app", "usr", "usr/share", "usr/share/x", "opt/new/er", "usr/share/x/y/z"]
)
def test_what_appears_later(private: PrivateFiles, root: Path, tmp_path: Path, place: str) -> None:
    (root / place).mkdir(parents=True, exist_ok=True)
    (root / place / "late").touch(0o600)
    deep = place == "usr/share/x/y/z"
    assert private.hide_new() == (0 if deep else 1), "that far down in /usr nothing is watched"
    assert hidden(tmp_path) == (EARLY if deep else sorted([*EARLY, f"{place}/late"]))
    (root / place / "second").touch(0o600)
    assert private.hide_new() == (0 if deep else 2)


def test_what_is_made_private_and_what_is_opened_again(private: PrivateFiles, root: Path, tmp_path: Path) -> None:
    (root / "opt/app/open").chmod(0o640)
    (root / "opt/app/early").chmod(0o644)
    assert private.hide_new() == 1
    assert hidden(tmp_path) == ["opt/app/open", "opt/closed"]


@pytest.mark.parametrize("without", ["watches", "queue"])
def test_without_word_from_the_kernel_everything_is_looked_at(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    if without == "watches":
        monkeypatch.setattr(PrivateFiles, "_watch", lambda self, *_: setattr(self, "_unwatched", True))
    else:
        monkeypatch.setattr(PrivateFiles, "_events", lambda _: iter([(-1, private_files.IN_Q_OVERFLOW, "")]))
    (tmp_path / "slot").mkdir()
    private = PrivateFiles(str(tmp_path), ["opt", "usr"], str(root))
    (root / "opt/app/early").rename(root / "opt/app/renamed")
    assert private.hide_new() == 1
    assert "opt/app/renamed" in hidden(tmp_path)
    private.close()
