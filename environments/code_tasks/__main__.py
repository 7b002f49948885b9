"""`python -m environments.code_tasks serve|process|evaluate`."""

from environments.code_tasks.code_env import CodeTasksEnv

CodeTasksEnv.cli()
