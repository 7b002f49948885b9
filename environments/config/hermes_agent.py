"""Reads the YAMLs of hermes-agent: keys that have another name here, or that nothing needs, with a line for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from environments.config.yaml_file import KeyPath
from sandbox_pool.providers.base import BUILT_IN
from sandbox_pool.terminal_env import PROVIDERS


def translate(data: dict[str, Any], path: KeyPath) -> str | None:
    """Put what a key of hermes-agent means in its place; a line that says what that is, or None for any other key."""
    section = _section(data, path[:-1])
    key = str(path[-1])
    rule = _RULES.get((str(path[0]), key)) if section is not None else None
    if section is None or rule is None:
        return None
    return f"{'.'.join(map(str, path))}: {section[key]!r} -> {rule(section, section.pop(key))}"


def _section(data: Any, path: KeyPath) -> dict[str, Any] | None:
    """The mapping at `path`: `env`, `openai`, or one of a list of servers."""
    if not path or len(path) > 2 or (len(path) == 2 and not isinstance(path[1], int)):
        return None
    for part in path:
        data = data[part]
    return data if isinstance(data, dict) else None


def _provider(env: dict[str, Any], backend: Any) -> str:
    pool = env.setdefault("pool", {})
    if isinstance(pool, Mapping) and "provider" in pool:
        return f"ignored: env.pool.provider is {pool['provider']!r}"
    named = PROVIDERS.get(str(backend))
    pool["provider"] = named if named in BUILT_IN else "local"
    where = "" if named in BUILT_IN else " (isolated slots of this machine; an image goes to env.sandbox.image)"
    return f"env.pool.provider: {pool['provider']!r}{where}"


def _pool_mode(env: dict[str, Any], mode: Any) -> str:
    return _provider(env, "local" if mode == "default" else mode)


def _timeout(server: dict[str, Any], timeout: Any) -> str:
    server.setdefault("timeout_s", timeout)
    return f"openai.timeout_s: {server['timeout_s']!r}"


def _nothing(why: str) -> Callable[[dict[str, Any], Any], str]:
    return lambda section, value: f"nothing: {why}"


_RULES: dict[tuple[str, str], Callable[[dict[str, Any], Any], str]] = {
    ("env", "terminal_backend"): _provider,
    ("env", "tool_pool_mode"): _pool_mode,
    ("env", "tool_pool_size"): _nothing("tools need no threads"),
    ("env", "container_persistent"): _nothing("every rollout starts from a clean slot"),
    ("openai", "health_check"): _nothing("every server is asked at the start, and again after faults"),
    ("openai", "timeout"): _timeout,
    ("openai", "num_max_requests_at_once"): _nothing("rollouts side by side are env.groups_at_once x env.group_size"),
    ("openai", "num_requests_for_eval"): _nothing("rollouts side by side are env.groups_at_once x env.eval_samples"),
    ("openai", "rolling_buffer_length"): _nothing("servers are not weighed by their latency"),
}
