"""Hosts on a Nomad cluster."""
