"""Hosts in Daytona sandboxes."""
