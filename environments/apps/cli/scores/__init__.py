"""Verbs about stored scores and what they rest on."""
