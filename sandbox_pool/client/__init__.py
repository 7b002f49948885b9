"""A slot as its holder sees it: one connection to a slot server, and sandboxes over it."""
