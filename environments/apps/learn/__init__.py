"""`hermes-rl learn`: a real model learns through the whole pipeline on this machine.

One process starts the rest: run-api, llama.cpp behind a front whose weights change, the environment in serve mode, and
the reference trainer. It evaluates on held-out tasks, prints what happens, and writes a run directory.
"""
