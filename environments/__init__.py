"""Atropos environments: a task in, a scored group out. The only package that imports atroposlib."""

import logging

# Only tokenizers of transformers are used; without this, it says at each start that PyTorch is missing.
logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())
