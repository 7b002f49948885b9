"""Layers of images on this host: unpacked once, kept by content, used as overlay layers."""
