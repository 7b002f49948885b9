"""Hosts in containers of a Docker or Podman engine."""
