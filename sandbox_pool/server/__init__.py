"""The slot server: one self-contained program (standard library, Python 3.9+) that runs wherever slots live."""
