"""One verb of the command line, run in this process; other verbs need not exist yet."""

from environments.apps.cli import main as cli
from environments.errors import SentenceParser, UsageError


def run_verb(name, *words):
    """Exit code of `hermes-rl NAME WORDS`, as the command itself computes it."""
    verb = cli.load_verb(name)
    parser = SentenceParser(prog=f"hermes-rl {name}")
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(list(words)))


__all__ = ["UsageError", "run_verb"]
