"""The page that shows a run: scores, outcomes, times, and every rollout as a readable conversation."""

from environments.runs.report.html_page import build_report

__all__ = ["build_report"]
