"""The page that shows a run: scores, outcomes, times, and every rollout as a readable conversation."""

from environments.report.build import build_report

__all__ = ["build_report"]
