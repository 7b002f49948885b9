"""Titles as parts of addresses."""

import re
import unicodedata


def slugify(title: str, longest: int = 40) -> str:
    """Lower-case words of a title, joined by dashes; cut at a word."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    words = re.split(r"[^a-z0-9]", plain.lower())
    slug = "-".join(words)
    return slug if len(slug) <= longest else slug[:longest].rsplit("-", 1)[0]
