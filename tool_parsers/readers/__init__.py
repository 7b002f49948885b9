"""Readers: one per grammar, each a small frozen spec that formats fill in."""
