"""Raw model text -> content, reasoning and tool calls, with per-call errors and repair provenance."""
