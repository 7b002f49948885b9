"""Exact tokens: how a chat template continues a sampled turn, and the ledger that keeps every id once."""
