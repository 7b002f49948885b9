"""Daytona on this machine, for its unmodified SDK: see README.md."""
