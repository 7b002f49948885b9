"""`python -m environments.code_tasks serve|process|evaluate`."""

from environments.code_tasks.env import CodeTasksEnv

CodeTasksEnv.cli()
