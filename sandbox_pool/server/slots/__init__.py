"""Slots, and the commands that run in them."""
