"""Shims between atroposlib 0.4.0 (archived) and the newest transformers and wandb.

- transformers 5 returns a BatchEncoding where atroposlib expects a list of ids: `plain_chat_template` mends
  one tokenizer.
- wandb is used only when it was asked for and can work without a question on the terminal: `wandb_obstacle` says what
  is in the way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

NO_KEY = "none"
"""Sent as the API key when none was given: openai >= 2 refuses an empty one."""


def plain_chat_template(tokenizer: Any) -> Any:
    """Make `apply_chat_template` of this tokenizer return a list of ids by default, as transformers 4 did."""
    original = tokenizer.apply_chat_template
    if getattr(original, "returns_plain_ids", False):
        return tokenizer

    def apply_chat_template(conversation: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("tokenize", True):
            kwargs.setdefault("return_dict", False)
        return original(conversation, *args, **kwargs)

    apply_chat_template.returns_plain_ids = True  # type: ignore[attr-defined]
    tokenizer.apply_chat_template = apply_chat_template
    return tokenizer


def usable_api_key(key: str | None) -> str:
    """A key that every openai client accepts; an empty one would fall back to OPENAI_API_KEY of the process."""
    return key or NO_KEY


def wandb_obstacle(environ: Mapping[str, str] | None = None) -> str | None:
    """Why wandb cannot be used now, in one sentence, or None when it can."""
    env = os.environ if environ is None else environ
    if env.get("WANDB_MODE", "").lower() in {"offline", "disabled", "dryrun"} or env.get("WANDB_API_KEY"):
        return None
    try:
        import environments.atropos.wandb_folders  # noqa: F401 - before wandb  # isort: skip
        import wandb
    except ImportError:
        return "wandb is not installed: metrics go to the log only"
    if getattr(wandb.api, "api_key", None):
        return None
    return "wandb is not logged in (run `wandb login`, or set WANDB_MODE=offline): metrics go to the log only"
