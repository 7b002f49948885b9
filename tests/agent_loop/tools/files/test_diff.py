"""Diffs are right, `patch` accepts them, and they stay cheap on large files."""

import shutil
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_loop.tools.files.patch import MAX_DIFF_CHARS, unified_diff


def test_a_change_far_down_has_the_line_numbers_of_the_file():
    before = "".join(f"line {n}\n" for n in range(1, 101))
    text = unified_diff("/w/a.py", before, before.replace("line 50\n", "LINE 50\n"))
    assert text.startswith("--- a/w/a.py\n+++ b/w/a.py\n@@ -47,7 +47,7 @@\n line 47\n")
    assert "-line 50\n+LINE 50" in text


def test_created_and_deleted_files_come_from_and_go_to_dev_null():
    assert unified_diff("a", None, "x\n").startswith("--- /dev/null\n+++ b/a")
    assert "+++ /dev/null" in unified_diff("a", "x\n", None)


def test_equal_texts_have_no_diff():
    assert unified_diff("a", "x\n", "x\n") == ""


def test_a_huge_change_is_summed_up_and_a_long_diff_is_cut():
    many = "".join(f"{n}\n" for n in range(50_000))
    assert "too many to show" in unified_diff("a", many, many.replace("1", "2"))
    long = unified_diff("a", None, "x" * 100 + "\n" + "y" * (2 * MAX_DIFF_CHARS))
    assert len(long) < MAX_DIFF_CHARS + 100


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch(1)")
@settings(max_examples=25)
@example(list("aaababaab"), list("aaabbaabbaab"))
@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.lists(st.sampled_from("abc"), min_size=1, max_size=30)
)
def test_the_real_patch_command_applies_them(old, new):
    before, after = ("".join(f"{line}\n" for line in lines) for lines in (old, new))
    text = unified_diff("f", before, after)
    if not text:
        assert before == after
        return
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "f").write_text(before)
        subprocess.run(["patch", "-s", "-p1"], input=text + "\n", text=True, cwd=folder, check=True)
        assert Path(folder, "f").read_text() == after
