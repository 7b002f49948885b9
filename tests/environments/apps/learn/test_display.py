"""What `learn` prints: lines in a pipe, a live table on a terminal."""

from __future__ import annotations

import io

from environments.apps.learn.display import LiveDisplay, PlainDisplay, sparkline
from support.learn_entries import evaluation, step


def test_lines_in_a_pipe_say_the_figures():
    out = io.StringIO()
    with PlainDisplay(out, every_s=0.0) as display:
        display.event(step(3, parse_rate=0.5, sampling_s=2.0, train_s=11.0, tokens_per_s=210.0))
        display.evaluating(1, 27)
        display.event(evaluation(10, 0.4, duration_s=61.0))
    first, second, third = out.getvalue().splitlines()
    assert "step 3: reward 0.300" in first
    assert "210 tokens/s, sampling 2.0 s tools - s training 11.0 s" in first
    assert "evaluating: 1 of 27 tasks" in second
    assert "held-out success 40.0 % ± 4.0 (8 rollouts of 2 tasks), parse rate 90.0 %, 61 s" in third
    assert sparkline([0.0, None, 0.5, 2.0], 0.0, 1.0) == "▁ ▅█"


def test_the_live_table_shows_the_last_figures_their_curves_and_what_goes_on():
    out = io.StringIO()
    with LiveDisplay(out) as display:
        display.event(evaluation(0, 0.4, duration_s=61.0))
        display.event(step(1, parse_rate=0.5, sampling_s=2.0))
        display.say("sampling for step 2")
        display.evaluating(1, 27)
    shown = out.getvalue()
    for text in ("held-out success", "40.0 % ± 4.0", "50.0 %", "sampling 2.0 s", "sampling for step 2: 1 of 27 tasks"):
        assert text in shown
