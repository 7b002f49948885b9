"""Starts a script inside the sandbox: reads the job from stdin, puts its files down, says hello, runs it as `__main__`.

It is given to the sandbox's Python with `-c`, so it leaves no file behind. The first lines must parse on any Python:
they are what tells an old one apart.
"""

# ruff: noqa: ANN001, ANN201, SIM105 - annotations would not parse on an old Python
import sys

if sys.version_info < (3, 8):
    sys.exit(86)

# `-c` puts the working directory first: a json.py lying there must not become ours.
sys.path[:] = [entry for entry in sys.path if entry]

import builtins
import json
import os
import shutil
import signal
import types

# The script's imports leave no __pycache__ in the workspace, and neither do the programs it starts.
sys.dont_write_bytecode = True
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def adopt_orphans():
    # type: () -> None
    """Become the parent of whatever the script's children leave behind, so that it can be ended too."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    except (ImportError, OSError, AttributeError):
        pass  # a Python without ctypes: only the direct children are ended


def children():
    # type: () -> list[int]
    found = []
    for name in os.listdir("/proc"):
        try:
            with open("/proc/" + name + "/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == os.getpid():
            found.append(int(name))
    return found


def end_children():
    # type: () -> None
    while True:
        ended = 0
        for pid in children():
            try:
                os.kill(pid, signal.SIGKILL)
                ended += 1
            except OSError:
                pass
        if not ended:
            return
        os.waitpid(-1, 0)


def supervise(script):
    # type: (int) -> None
    """Wait for the script, end what it started, remove its folder, and end as it did."""
    _, status = os.waitpid(script, 0)
    try:
        end_children()
    except OSError:
        pass  # no /proc here, or nothing left to wait for
    shutil.rmtree(folder, ignore_errors=True)
    if os.WIFSIGNALED(status):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


job = json.loads(sys.stdin.buffer.read().decode("utf-8"))
folder = job["folder"]
os.makedirs(folder, mode=0o700)
for name, text in job["files"].items():
    with open(os.path.join(folder, name), "x", encoding="utf-8") as file:
        file.write(text)

adopt_orphans()
script = os.fork()
if script:
    supervise(script)

nothing = os.open(os.devnull, os.O_RDONLY)
os.dup2(nothing, 0)
os.close(nothing)
sys.stdin = open(0, encoding="utf-8", closefd=False)

sys.path.insert(0, folder)
import hermes_tools

hermes_tools._hello()

sys.path.insert(1, os.getcwd())
path = os.path.join(folder, "script.py")
sys.argv = [path]
boot = sys.modules["__main__"]
main = types.ModuleType("__main__")
main.__dict__.update(__file__=path, __builtins__=builtins)
sys.modules["__main__"] = main
try:
    exec(compile(job["files"]["script.py"], path, "exec"), main.__dict__)
except SystemExit:
    raise
except BaseException:
    kind, error, trace = sys.exc_info()
    inner = trace.tb_next if trace is not None else None
    if kind is not None and error is not None:
        sys.excepthook(kind, error.with_traceback(inner), inner)
    sys.exit(1)
