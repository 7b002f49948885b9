"""The agent loop: messages -> model -> tool calls -> results -> messages, with tokens and metrics recorded."""
