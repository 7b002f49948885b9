"""How settings come in: YAML and dotted flags into a typed model, strictly.

    settings = load_config(MySettings, "terminal_tasks", ["--env.group_size", "8"])

Unknown keys, wrong types and values out of range raise `ConfigError`: one sentence that names the file and line (or
the flag), what is wrong there, and what would be right. Nothing is read from or written to the process environment.
"""
