"""From what the agent left behind to a reward: the frozen workspace, contexts, verdicts, shaping."""
