"""The slot server: one program with N isolated slots, run wherever slots live (standard library, Python 3.9+)."""
