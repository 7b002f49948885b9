"""Clients and their requests."""
