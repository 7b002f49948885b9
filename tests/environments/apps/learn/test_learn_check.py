"""The proof of the whole, at full size: a real model learns within twenty minutes (`make learn-check`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from environments.apps.learn.run_folder import read_entries
from support.learn_rise import rise_in_standard_errors
from support.tokens_cpu import require_cpu_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

FAR = 5.0
"""Standard errors of the difference that no chance explains."""


def test_held_out_success_rises_far_outside_the_noise(tmp_path: Path) -> None:
    require_cpu_model()
    pytest.importorskip("jax", reason="jax is not installed (extra learn)")
    learn = [sys.executable, "-m", "environments.apps.cli.main", "learn"]
    subprocess.run([*learn, "--minutes", "20", "--out", str(tmp_path / "run")], check=True)
    entries = read_entries(tmp_path / "run")
    assert rise_in_standard_errors(entries, rollouts=200) > FAR
    differences = [entry["logprob_difference_mean"] for entry in entries if entry["event"] == "step"]
    # A step in which no group had a signal recomputes nothing.
    assert max(difference for difference in differences if difference is not None) <= 0.1
