"""A killed process's temporary folders are removed by the next one; a living one's are left alone."""

import subprocess
import sys

from sandbox_pool.journal.owner import this_process
from sandbox_pool.owned_folders import make_owned_folder, sweep

MAKE = """
import sys, time
from pathlib import Path
from sandbox_pool.owned_folders import make_owned_folder
folder = make_owned_folder("x-", Path(sys.argv[1]))
(folder / "data").write_text("left")
print(folder, flush=True)
time.sleep(60)
"""


def start(root):
    child = subprocess.Popen([sys.executable, "-c", MAKE, str(root)], stdout=subprocess.PIPE, text=True)
    return child, child.stdout.readline().strip()


def test_the_folder_stands_below_one_named_after_this_process(tmp_path):
    folder = make_owned_folder("x-", tmp_path)
    assert folder.is_dir()
    assert folder.parent.name == this_process().tag()
    assert make_owned_folder("x-", tmp_path) != folder


def test_a_killed_processs_folders_are_swept_and_a_living_ones_are_not(tmp_path):
    killed, left = start(tmp_path)
    living, kept = start(tmp_path)
    try:
        killed.kill()
        killed.wait()
        (tmp_path / "somebody-elses").mkdir()
        removed = sweep(tmp_path)
        assert [str(path) for path in removed] == [left.rpartition("/")[0]]
        assert {path.name for path in tmp_path.iterdir()} == {"somebody-elses", kept.split("/")[-2]}
    finally:
        living.kill()
        living.wait()
        living.stdout.close()
        killed.stdout.close()


def test_a_process_that_ends_by_itself_leaves_nothing(tmp_path):
    code = MAKE.replace("time.sleep(60)", "")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)
    assert list(tmp_path.iterdir()) == []


def test_the_first_call_sweeps(tmp_path):
    killed, left = start(tmp_path)
    killed.kill()
    killed.wait()
    killed.stdout.close()
    make_owned_folder("x-", tmp_path)
    assert left.rpartition("/")[0] not in {str(path) for path in tmp_path.iterdir()}
