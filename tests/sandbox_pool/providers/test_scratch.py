import os
from pathlib import Path

import pytest

from sandbox_pool.errors import ScratchFull
from sandbox_pool.providers import local as scratch

MOUNTS = """\
overlay / overlay rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb /home/local\\040disk ext4 rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/dev/shm/x", "tmpfs"), ("/home/u", "nfs4"), ("/home/local disk/x", "ext4"), ("/homeless", "overlay")],
)
def test_the_type_of_the_innermost_mount_counts(path, kind):
    assert scratch.file_system_type(Path(path), MOUNTS) == kind


def test_a_configured_place_is_made_and_used(tmp_path):
    wanted = tmp_path / "a" / "b"
    assert scratch.choose_scratch(wanted) == wanted / f"hermes-rl-{os.getuid()}"
    assert wanted.is_dir()


def test_network_and_overlay_file_systems_are_passed_over(tmp_path, monkeypatch):
    slow, fast = tmp_path / "slow", tmp_path / "fast"
    slow.mkdir()
    fast.mkdir()
    monkeypatch.setattr(scratch, "file_system_type", lambda path: "nfs4" if path == slow else "ext4")
    assert scratch.choose_scratch(None, [tmp_path / "missing", slow, fast]).parent == fast
    assert scratch.choose_scratch(None, [slow]).parent == slow


def test_no_place_at_all_is_a_clear_error(tmp_path):
    with pytest.raises(ScratchFull, match="scratch_dir"):
        scratch.choose_scratch(None, [tmp_path / "missing"])


def test_too_little_space_is_a_clear_error(tmp_path):
    scratch.require_space(tmp_path, 0)
    with pytest.raises(ScratchFull, match=r"is full: \d+ MB free, 99999999 MB are kept"):
        scratch.require_space(tmp_path, 99_999_999)
