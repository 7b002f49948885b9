"""Hosts in Modal sandboxes."""
