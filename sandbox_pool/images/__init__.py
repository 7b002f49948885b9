"""Images that tasks name: where they come from, what they hold, and how their layers get to a host."""
