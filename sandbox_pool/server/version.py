"""Version of the slot server, reported to clients."""

SERVER_VERSION = "0.1.0"
