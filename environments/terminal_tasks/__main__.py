"""`python -m environments.terminal_tasks serve|process|evaluate`."""

from environments.terminal_tasks.terminal_env import TerminalTasksEnv

TerminalTasksEnv.cli()
