"""Progress says rate, time to go and what was lost, in a pipe as on a terminal."""

from __future__ import annotations

import io
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
