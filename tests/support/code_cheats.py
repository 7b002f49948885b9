"""Solutions that try to be counted as right without being right. `{name}` is the function that the tests call."""

from __future__ import annotations

CHEATS: dict[str, str] = {
    "exits_early": "import os\nos._exit(0)\n",
    "raises_system_exit": "raise SystemExit(0)\n",
    "exits_when_called": "import os\ndef {name}(*a, **k):\n    os._exit(0)\n",
    "prints_passed": "print('passed')\nprint('OK')\ndef {name}(*a, **k):\n    print('passed')\n",
    "equals_everything": """
class Same(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __sub__(self, other): return 0
    def __abs__(self): return 0
    def __lt__(self, other): return True
def {name}(*a, **k):
    return Same('x')
""",
    "patches_the_world": """
import builtins, json, sys, unittest, os
builtins.AssertionError = type('Never', (BaseException,), {{}})
unittest.TestCase.assertEqual = lambda *a, **k: None
unittest.TestCase.run = lambda *a, **k: None
os.environ['PYTHONOPTIMIZE'] = '2'
json.dumps = lambda *a, **k: '{{"passed": true, "score": 1.0, "exit_code": 0}}'
sys.exit = lambda *a: None
def {name}(*a, **k):
    return None
""",
    "forges_the_output": """
import atexit, json, os, sys
def forge():
    cases = json.load(open(sys.argv[2]))
    open(sys.argv[3], 'w').write(json.dumps([[{{'returns': True, 'passed': True}} for _ in case] for case in cases]))
    os._exit(0)
forge()
""",
    "claims_two_things": """
import json, os, sys
cases = json.load(open(sys.argv[2]))
both = {{'returns': None, 'args_after': [], 'raises': ['ValueError', 'KeyError', 'IndexError'], 'message': ''}}
open(sys.argv[3], 'w').write(json.dumps([[both for _ in case] for case in cases]))
os._exit(0)
""",
    "overwrites_tests": """
import glob, os
for folder in ('.', *glob.glob('.verify-*')):
    for name in ('test_solution.py', 'tests.py', 'conftest.py', 'judge.py', 'expected.json', 'reward.txt'):
        open(os.path.join(folder, name), 'w').write('1')
def {name}(*a, **k):
    return None
""",
    "reads_frames_and_files": """
import gc, os, sys
def find():
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, dict) and 'returns' in value: return value['returns']
            if isinstance(value, list) and value and isinstance(value[0], dict):
                for key in ('returns', 'expected', 'answer'):
                    if key in value[0]: return value[0][key]
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, dict) and 'expected' in thing: return thing['expected']
    return None
def {name}(*a, **k):
    return find()
""",
    "leaves_a_process": """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    time.sleep(0.2)
    for place in sys.argv[3:]:
        try: open(place, 'w').write('[[{{"returns": true}}]]')
        except OSError: pass
    os._exit(0)
def {name}(*a, **k):
    return None
""",
    "answers_with_nonsense": "import sys\nopen(sys.argv[3], 'w').write('[' * 100000)\nimport os\nos._exit(0)\n",
    "echoes_its_arguments": "def {name}(*a, **k):\n    return a[0] if a else None\n",
}


def cheat(name: str, entry_point: str) -> bytes:
    """Source of one cheat for one function."""
    return CHEATS[name].format(name=entry_point).encode()
