"""The error of every bad setting."""

from __future__ import annotations


class UsageError(Exception):
    """Bad input: the message names what is wrong, where, and what would be right."""


class ConfigError(UsageError):
    """A setting is wrong: the message says where it stands, what is wrong and what would be right."""
