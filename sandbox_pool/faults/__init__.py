"""Faults on demand, for tests: a provider whose hosts and connections fail, full disks, clocks that jump."""
