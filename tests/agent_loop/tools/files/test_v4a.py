"""V4A patches: read line by line with errors that name the line, applied in memory, all files or none."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.tools.files.v4a import apply_changes, parse_patch, paths_of
from agent_loop.tools.tool import ToolFailure

FILE = "import os\n\n\ndef f():\n    a = 1\n    return a\n\n\ndef g():\n    a = 1\n    return a\n"


def patched(patch, files):
    changes = parse_patch(f"*** Begin Patch\n{patch}\n*** End Patch")
    return apply_changes(changes, {path: files.get(path) for path in paths_of(changes)})


def test_a_hunk_with_context_changes_its_lines():
    new = patched("*** Update File: a.py\n import os\n+import sys\n ", {"a.py": FILE})
    assert new == {"a.py": FILE.replace("import os\n", "import os\nimport sys\n")}


def test_a_hint_chooses_between_places_that_look_alike():
    new = patched("*** Update File: a.py\n@@ def g():\n-    a = 1\n+    a = 2\n     return a", {"a.py": FILE})
    assert new["a.py"].endswith("def g():\n    a = 2\n    return a\n")
    assert "def f():\n    a = 1\n" in new["a.py"]


def test_a_hint_may_be_closed_with_at_signs():
    new = patched("*** Update File: a.py\n@@ def g(): @@\n-    a = 1\n+    a = 2", {"a.py": FILE})
    assert new["a.py"].count("a = 2") == 1
    assert new["a.py"].index("a = 2") > new["a.py"].index("def g")


def test_two_hints_narrow_down():
    text = "class A:\n    def f(self):\n        x\nclass B:\n    def f(self):\n        x\n"
    new = patched("*** Update File: a\n@@ class B:\n@@ def f(self):\n-        x\n+        y", {"a": text})
    assert new["a"] == text[::-1].replace("x", "y", 1)[::-1]


def test_a_hunk_that_fits_several_places_is_refused():
    with pytest.raises(ToolFailure, match=r"matches 2 places \(lines 5, 10\)"):
        patched("*** Update File: a.py\n-    a = 1\n+    a = 2", {"a.py": FILE})


def test_hunks_follow_each_other_down_the_file():
    patch = "*** Update File: a.py\n def f():\n-    a = 1\n+    a = 2\n@@\n-    a = 1\n+    a = 3"
    new = patched(patch, {"a.py": FILE})
    assert [line for line in new["a.py"].split("\n") if "a =" in line] == ["    a = 2", "    a = 3"]


def test_files_are_added_updated_moved_and_deleted_in_one_patch():
    patch = (
        "*** Add File: new.txt\n+one\n+\n+three\n*** Update File: a\n-x\n+y\n"
        "*** Update File: old/name\n*** Move to: new/name\n-1\n+2\n*** Delete File: gone"
    )
    files = {"a": "x\n", "old/name": "1\n", "gone": "bye\n"}
    assert patched(patch, files) == {
        "new.txt": "one\n\nthree\n",
        "a": "y\n",
        "old/name": None,
        "new/name": "2\n",
        "gone": None,
    }


def test_the_same_file_in_two_sections_sees_the_first_change():
    new = patched("*** Update File: a\n-1\n+2\n*** Update File: a\n-2\n+3", {"a": "1\n"})
    assert new == {"a": "3\n"}


def test_lines_can_be_added_at_the_end():
    assert patched("*** Update File: a\n@@\n+last\n*** End of File", {"a": "x\n"}) == {"a": "x\nlast\n"}


def test_lines_can_be_added_below_a_hint():
    assert patched("*** Update File: a\n@@ x\n+y", {"a": "x\nz\n"}) == {"a": "x\ny\nz\n"}


def test_end_of_file_chooses_the_last_place():
    assert patched("*** Update File: a\n-x\n+y\n*** End of File", {"a": "x\nx\n"}) == {"a": "x\ny\n"}


def test_a_file_without_a_final_newline_stays_so():
    assert patched("*** Update File: a\n-x\n+y", {"a": "w\nx"}) == {"a": "w\ny"}


def test_context_that_differs_in_whitespace_stays_as_the_file_has_it():
    new = patched(
        "*** Update File: a\n def f():\n-  return 1\n+  return 2\n # end", {"a": "def f():  \n  return 1\n# end\t\n"}
    )
    assert new == {"a": "def f():  \n  return 2\n# end\t\n"}


def test_other_indentation_is_forgiven():
    new = patched("*** Update File: a\n-x = 1\n+x = 2\n+y = 3", {"a": "if True:\n    x = 1\n"})
    assert new == {"a": "if True:\n    x = 2\n    y = 3\n"}


def test_an_empty_context_line_may_lack_its_space():
    new = patched("*** Update File: a\n x\n\n-y\n+z", {"a": "x\n\ny\n"})
    assert new == {"a": "x\n\nz\n"}


@pytest.mark.parametrize(
    "wrapping", ["{}", "*** Begin Patch\n{}", "*** Begin Patch\n{}\n*** End Patch\ntrailing words"]
)
def test_markers_may_be_missing_and_what_follows_the_end_is_ignored(wrapping):
    changes = parse_patch(wrapping.format("*** Delete File: a"))
    assert [(change.kind, change.path) for change in changes] == [("delete", "a")]


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("", "no file sections"),
        ("hello", "line 1: expected"),
        ("*** Update File:", "line 1: a path is missing"),
        ("*** Update File: a", "changes nothing"),
        ("*** Update File: a\n x\n*** Frobnicate", "line 3: a line of a hunk begins with"),
        ("*** Move File: a", "line 1: write '\\*\\*\\* Move File: OLD -> NEW'"),
        ("*** Move File: a -> ", "line 1: write '\\*\\*\\* Move File: OLD -> NEW'"),
        ("*** Add File: a\nno plus", "line 2: every line of an added file"),
        ("*** Delete File: a\n-x", "line 2: a Delete File section has no lines"),
    ],
)
def test_what_is_wrong_with_a_patch_is_named_with_its_line(patch, said):
    with pytest.raises(ToolFailure, match=said):
        parse_patch(patch)


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("*** Add File: a\n+x", "exists already"),
        ("*** Update File: none\n-x\n+y", "does not exist"),
        ("*** Delete File: none", "does not exist"),
        ("*** Update File: a\n*** Move to: b", "which exists already"),
        ("*** Update File: a\n-nothing like it at all\n+y", "does not match the file"),
        ("*** Update File: a\n@@ no such line\n+y", "is not in the file"),
    ],
)
def test_a_patch_that_does_not_fit_the_files_changes_nothing(patch, said):
    files = {"a": "x\n", "b": "y\n"}
    with pytest.raises(ToolFailure, match=said):
        patched(patch, files)
    assert files == {"a": "x\n", "b": "y\n"}


def test_the_nearest_lines_help_to_mend_a_hunk():
    with pytest.raises(ToolFailure, match=r"5\|    a = 1"):
        patched("*** Update File: a.py\n     a = 1 + 2\n-    return b\n+    return c", {"a.py": FILE})


lines = st.lists(st.text(alphabet="abcd", min_size=1, max_size=3), min_size=1, max_size=8, unique=True)


@given(lines, lines)
def test_a_patch_that_replaces_everything_does(old, new):
    text = "".join(f"{line}\n" for line in old)
    hunk = "".join(f"-{line}\n" for line in old) + "".join(f"+{line}\n" for line in new)
    want = "".join(f"{line}\n" for line in new)
    assert patched(f"*** Update File: f\n{hunk}", {"f": text}) == ({} if want == text else {"f": want})


@given(st.text(alphabet="*+- @abEndPtchUpdaFile:\n", max_size=200))
def test_reading_garbage_gives_changes_or_a_tool_failure(text):
    with contextlib.suppress(ToolFailure):
        assert parse_patch(text)


def test_a_file_is_moved_by_a_section_of_its_own():
    assert patched("*** Move File: a -> dir/b", {"a": "x\n"}) == {"a": None, "dir/b": "x\n"}


def test_a_moved_file_may_be_changed_in_the_same_section():
    assert patched("*** Move File: a -> b\n-x\n+y", {"a": "x\n"}) == {"a": None, "b": "y\n"}


def test_markers_without_the_space_are_read():
    changes = parse_patch("***Begin Patch\n***Update File: a\n***Move to: b\n-x\n+y\n***End of File\n***End Patch\nz")
    assert apply_changes(changes, {"a": "x\nx\n", "b": None}) == {"a": None, "b": "x\ny\n"}


def test_context_without_its_leading_space_is_read_as_context_and_that_is_noted():
    text = "import os\n\ndef f():\n    a = 1\n"
    changes = parse_patch("*** Begin Patch\n*** Update File: a\ndef f():\n-    a = 1\n+    a = 2\n*** End Patch")
    assert apply_changes(changes, {"a": text}) == {"a": text.replace("1", "2")}
    assert changes[0].notes == ["patch line 3 has no ' ', '+' or '-' before it: read as context"]


def test_a_hunk_that_was_not_found_exactly_is_noted():
    changes = parse_patch('*** Update File: a\n-say("hi") -- now\n+bye')
    assert apply_changes(changes, {"a": "say(\u201chi\u201d) \u2014 now\n"}) == {"a": "bye\n"}
    assert changes[0].notes == ["the hunk at patch line 2 was found by ignoring differences in dashes"]


def test_markers_that_the_file_itself_has_are_context():
    patch = "*** Update File: g\n old\n *** End Patch\n+new\n *** Begin Patch\n-last\n+LAST"
    text = "old\n*** End Patch\n*** Begin Patch\nlast\n"
    assert patched(patch, {"g": text}) == {"g": "old\n*** End Patch\nnew\n*** Begin Patch\nLAST\n"}


@pytest.mark.parametrize("around", ["```\n{}\n```", "Here it is:\n{}", " {}", "{}\nThat was all."])
def test_what_stands_around_a_patch_is_no_part_of_it(around):
    patch = around.format("*** Begin Patch\n*** Update File: f\n-a\n+b\n*** End Patch")
    assert apply_changes(parse_patch(patch), {"f": "a\n"}) == {"f": "b\n"}


def test_patches_one_after_the_other_are_all_applied():
    patch = "*** Update File: f\n-a\n+b\n*** End Patch\n*** Begin Patch\n*** Add File: g\n+c"
    assert patched(patch, {"f": "a\n"}) == {"f": "b\n", "g": "c\n"}
