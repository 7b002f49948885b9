"""Tools that search and read the web, or a corpus on disk."""
