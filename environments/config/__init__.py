"""The one way settings come in: YAML and dotted flags into a typed model, strictly.

    settings = load_config(MySettings, "terminal_tasks", ["--env.group_size", "8"])

Unknown keys, wrong types and values out of range raise `ConfigError`: one sentence that names the file and line (or
the flag), what is wrong there, and what would be right. Nothing is read from or written to the process environment.
"""

from environments.config.loader import load_config, masked
from environments.config.yaml_file import config_names, find_config
from environments.errors import ConfigError

__all__ = ["ConfigError", "config_names", "find_config", "load_config", "masked"]
