"""Progress says rate, time to go and what was lost, in a pipe as on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import time

from environments.runs.progress import BarProgress, PlainProgress, Tally, progress_for


def tally(**more: float) -> Tally:
    values = {"total": 100, "done": 30, "resumed": 10, "rollouts": 40, "score_sum": 10.0} | more
    return Tally(**values, started_at=time.monotonic() - 60)  # type: ignore[arg-type]


def test_the_line_has_rate_eta_and_losses() -> None:
    line = tally(lost=2, dropped=1).line()
    assert line.startswith("30/100 groups, 20.0/min, eta 3:30, 40 rollouts, mean score 0.250")
    assert line.endswith("2 lost, 1 dropped")


def test_before_the_first_group_nothing_is_made_up() -> None:
    assert Tally(5).line() == "0/5 groups, 0.0/min, eta -, 0 rollouts, mean score -"


def test_a_pipe_gets_few_lines_and_always_the_last() -> None:
    out = io.StringIO()
    with PlainProgress(out, every_s=3600) as progress:
        for done in range(31):
            progress.show(tally(done=done))
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["0/100", "30/100"]


def test_a_terminal_gets_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with progress_for(out) as progress:
        assert isinstance(progress, BarProgress)
        progress.show(tally())
    assert "30/100 groups" in out.getvalue()


PROGRAM = """
import logging, sys, time
from environments.launch import configure_logging
from environments.runs.progress import Tally, progress_for
configure_logging()
log = logging.getLogger("environments.x")
with progress_for() as progress:
    progress.show(Tally(3, done=1))
    log.warning("first word")
    progress.show(Tally(3, done=2))
    log.warning("second word")
"""


def test_log_lines_stand_on_lines_of_their_own_above_the_bar() -> None:
    """On a real terminal: what a log line and the bar leave on a screen, drawn by a terminal emulator's rules."""
    main, side = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=side, stdout=side, env=environment)
    os.close(side)
    said = b""
    with contextlib.suppress(OSError):  # the terminal's end
        while part := os.read(main, 65536):
            said += part
    os.close(main)
    assert process.wait(timeout=60) == 0
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rpartition("\r")[2] for line in said.decode().split("\r\n")]
    for word in ("first word", "second word"):
        (line,) = [line for line in lines if word in line]
        assert re.fullmatch(r"\d\d:\d\d:\d\d W environments.x: " + word, line.strip())
    assert b"\x1b[3" not in said  # NO_COLOR: the bar moves the cursor, and colours nothing
