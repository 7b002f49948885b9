"""Hosts on machines that are reached by ssh."""
