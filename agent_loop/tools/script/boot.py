"""Starts a script inside the sandbox: reads the job from stdin, puts its files down, says hello, runs it as `__main__`.

It is given to the sandbox's Python with `-c`, so it leaves no file behind. The first lines must parse on any Python:
they are what tells an old one apart.
"""

import sys

if sys.version_info < (3, 8):
    sys.exit(86)

# `-c` puts the working directory first: a json.py lying there must not become ours.
sys.path[:] = [entry for entry in sys.path if entry]

import atexit
import builtins
import json
import os
import shutil
import types

job = json.loads(sys.stdin.buffer.read().decode("utf-8"))
folder = job["folder"]
os.makedirs(folder, mode=0o700)
started_by = os.getpid()
atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == started_by else None)
for name, text in job["files"].items():
    with open(os.path.join(folder, name), "x", encoding="utf-8") as file:
        file.write(text)

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
