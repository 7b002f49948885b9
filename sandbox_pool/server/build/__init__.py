"""Compiles the helper and packs the server into one file; not part of the packed server."""
