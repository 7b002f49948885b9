"""Models that run on this machine: a real one on the CPU, and a stand-in that plays scripted turns."""
