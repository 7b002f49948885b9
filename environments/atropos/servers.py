"""atroposlib's own servers as a token backend, for environments that are given its `APIServerConfig`s.

Calls go to `tokens_and_logprobs_completion` of one server at a time, below atroposlib's own retries and health waits:
those wait without limit for a server that is down and ask three times where the server said no. The loop above
retries by its rules instead. Prompt ids that atroposlib changed on the way (it drops a doubled BOS) are an error: the
recorder's ids would no longer be what the model saw.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import aiohttp

from agent_loop.model.backends.backend import Generation
from agent_loop.model.contract import ModelRefused, ModelUnavailable, Sampling
from agent_loop.model.errors import translate

FINISHED = frozenset({"stop", "length"})


class AtroposServerBackend:
    """Ids in, ids and logprobs out, over the servers of a ServerManager (vllm or sglang)."""

    def __init__(self, manager: Any) -> None:
        self._servers = list(manager.servers)
        self._turn = itertools.count()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        """Sample one continuation. Raises the errors of `agent_loop.model.contract`; never retries by itself."""
        server = self._least_busy()
        options = _options(server, sampling, stop_ids)
        async with server.sem:
            try:
                answer = await server._tokens_and_logprobs_completion_wrapper(
                    model=server.config.model_name, input_ids=list(prompt_ids), n=1, **options
                )
            except NotImplementedError as error:
                raise ModelRefused(f"{type(server).__name__} of atroposlib gives no tokens: {error}") from error
            except (aiohttp.ClientError, OSError) as error:
                raise translate(error) from error
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise ModelRefused(f"{server.config.base_url} answered nonsense: {error!r}") from error
        return _generation(prompt_ids, answer)

    async def context_tokens(self) -> int | None:
        """atroposlib does not ask its servers."""
        return None

    async def close(self) -> None:
        """Stop the endless health checks, if any server started one."""
        for server in self._servers:
            if server.check_task is not None:
                server.check_task.cancel()

    def _least_busy(self) -> Any:
        turn = next(self._turn)
        count = len(self._servers)
        order = [self._servers[(turn + step) % count] for step in range(count)]
        return max(order, key=lambda server: server.sem._value)


def _options(server: Any, sampling: Sampling, stop_ids: Sequence[int]) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": sampling.temperature, **sampling.extra_body}
    if sampling.max_tokens is not None:
        options["max_tokens"] = sampling.max_tokens
    if sampling.top_p is not None:
        options["top_p"] = sampling.top_p
    if sampling.stop:
        options["stop"] = list(sampling.stop)
    if stop_ids:
        options["stop_token_ids"] = list(stop_ids)
    if sampling.seed is not None and server.config.server_type == "vllm":
        options["seed"] = sampling.seed
    return options


def _generation(prompt_ids: Sequence[int], answer: tuple[Any, Any, Any, Any]) -> Generation:
    sent, tokens, logprobs, reasons = answer
    if list(sent) != list(prompt_ids):
        raise ModelRefused("atroposlib changed the prompt ids on the way (doubled BOS): the template writes BOS twice")
    if not tokens or len(tokens[0]) != len(logprobs[0]):
        raise ModelRefused("the server gave no tokens, or another number of logprobs")
    reason = reasons[0].get("type") if isinstance(reasons[0], dict) else reasons[0]
    if reason not in FINISHED:
        raise ModelUnavailable(f"the server gave up on the request (finish reason {reason!r})")
    return Generation([int(token) for token in tokens[0]], [float(value) for value in logprobs[0]], reason)
