"""Self-contained shell and file tasks, generated from seeds, checked by deterministic verifiers."""

from environments.terminal_tasks.generate import TerminalTasks, make_task, task_from_id
from environments.terminal_tasks.terminal_task import TerminalTask

__all__ = ["TerminalTask", "TerminalTasks", "make_task", "task_from_id"]
