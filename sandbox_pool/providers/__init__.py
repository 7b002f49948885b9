"""Where slot servers run: each provider only starts the server somewhere and says how to reach it."""
