"""All task kinds; importing this package fills the registry."""

from environments.terminal_tasks.kinds import files, logs, places, programs, repositories, tables, text
from environments.terminal_tasks.kinds.kind import KINDS, Kind

__all__ = ["KINDS", "Kind", "files", "logs", "places", "programs", "repositories", "tables", "text"]
