"""Keeps prompts and tool results within their budgets."""
