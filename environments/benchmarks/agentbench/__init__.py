"""AgentBench OS: shell tasks with init scripts, checks and example solutions."""
