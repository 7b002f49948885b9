"""Write or fix a Python function or module; hidden tests decide, and cannot be reached, read or forged."""

from environments.code_tasks.code_task import CodeTask
from environments.code_tasks.datasets import load_tasks

__all__ = ["CodeTask", "load_tasks"]
