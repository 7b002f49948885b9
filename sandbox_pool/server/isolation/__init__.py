"""How a slot is kept apart from the host and from other slots."""
