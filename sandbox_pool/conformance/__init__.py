"""Every promise a sandbox makes, as checks for any provider: `hermes-rl pool check --provider X`."""

from sandbox_pool.conformance.check import Check, CheckResult
from sandbox_pool.conformance.runner import all_checks, run_check, run_checks

__all__ = ["Check", "CheckResult", "all_checks", "run_check", "run_checks"]
