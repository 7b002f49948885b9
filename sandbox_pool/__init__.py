"""Leases on isolated slots: exec, files, processes, reset."""
