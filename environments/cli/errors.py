"""Errors that the command line turns into one sentence and exit code 2."""

from __future__ import annotations


class UsageError(Exception):
    """Bad input: the message names what is wrong, where, and what would be right."""
