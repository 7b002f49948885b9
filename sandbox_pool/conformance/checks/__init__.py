"""The checks, one module per subject. A check's docstring is the promise it holds the provider to."""
