"""What travels into the sandbox for execute_code. Its files run there, on Python 3.8 or newer."""
