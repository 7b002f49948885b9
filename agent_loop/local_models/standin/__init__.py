"""A stand-in for a policy: a local server with real token ids and logprobs that plays scripted turns.

For demos, tests and users' own tests, with nothing to download: `async with StandIn(policy) as server: server.url`,
or `python -m agent_loop.local_models.standin`.
"""

from agent_loop.local_models.standin.chatml import chatml_tokenizer
from agent_loop.local_models.standin.policies import POLICIES, Fault, Policy, PolicyRequest, Reply, named_policy
from agent_loop.local_models.standin.server import Exchange, StandIn

__all__ = [
    "POLICIES",
    "Exchange",
    "Fault",
    "Policy",
    "PolicyRequest",
    "Reply",
    "StandIn",
    "chatml_tokenizer",
    "named_policy",
]
