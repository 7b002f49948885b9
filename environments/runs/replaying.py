"""A recorded rollout once more, from its cassette alone: no model, no slots, the same code.

Equal means: every request to model and slots is one that the recording has, and the record that comes out is the same
byte for byte, measured times left out. The first difference is a `Divergence`, whichever kind it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from agent_loop.records.record import RolloutRecord
from agent_loop.records.tape import Divergence, Replay, playing
from environments.base import HermesAgentBaseEnv
from environments.errors import ConfigError, UsageError
from environments.launch import find_environment, load_environment
from environments.rollouts.cassettes import FOLDER, Cassette, Cassettes, TapedPool
from environments.rollouts.planning import RolloutJob, plan_group
from environments.rollouts.rollouts import Rollouts

MEASURED = frozenset({"timing", "model_s", "tools_s", "duration_s"})
"""Keys of a record that say how long something took."""
SHOWN_CHARS = 400


@dataclass(frozen=True)
class Replayed:
    """What a replay gave."""

    record: RolloutRecord
    divergence: Divergence | None
    model_answers: int
    slot_answers: int

    @property
    def equal(self) -> bool:
        """Whether the rollout went exactly as it was recorded."""
        return self.divergence is None

    def __str__(self) -> str:
        if self.divergence is not None:
            return f"{self.record.rollout_id} diverges at {self.divergence}"
        return (
            f"{self.record.rollout_id} replayed: {self.model_answers} model answers, {self.slot_answers} slot answers, "
            f"outcome {self.record.outcome}, score {self.record.score}: equal"
        )


def find_cassette(run: Path, rollout_id: str | None = None) -> Path:
    """The cassette of a rollout of a run; `run` may be the cassette itself."""
    if run.is_file():
        return run
    if not run.is_dir():
        raise UsageError(f"there is no run {run}")
    if not (run / FOLDER).is_dir():
        raise UsageError(f"{run} has no cassettes: record some with --env.cassettes true")
    if rollout_id is None:
        raise UsageError(f"which rollout of {run}? Name one, such as {_some_names(run)}")
    path = Cassettes.file(run, rollout_id)
    if not path.is_file():
        raise UsageError(f"{run} has no cassette of the rollout {rollout_id!r}; there are {_some_names(run)}")
    return path


def _some_names(run: Path) -> str:
    from urllib.parse import unquote

    names = sorted(unquote(path.name.removesuffix(".jsonl.gz")) for path in (run / FOLDER).glob("*.jsonl.gz"))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


async def replay(
    cassette: Path | str, *, environment: HermesAgentBaseEnv | None = None, settings: Sequence[str] = ()
) -> Replayed:
    """Play a cassette. `environment` is one of yours instead of the recorded one, not opened yet."""
    recorded = Cassette.read(Path(cassette))
    env = environment or _environment(recorded.about, settings)
    env.replayed = True
    env.model_context = recorded.about["model_context"]
    env.pool = TapedPool(None, env.config.pool.exec_timeout_s)
    tape = Replay(recorded.entries)
    async with Rollouts(env, mode=recorded.about["mode"]) as rollouts:
        job = _job(env, recorded.about, await _item(env, recorded.about))
        token = playing.set(tape)
        try:
            rollout = await rollouts.runner().run(job)
        finally:
            playing.reset(token)
    tape.end()
    divergence = tape.divergence or first_difference(recorded.record, rollout.record)
    kinds = [entry.get("kind") for entry in recorded.entries]
    slots = sum(kind in ("slot", "lease", "download_snapshot") for kind in kinds)
    return Replayed(rollout.record, divergence, len([k for k in kinds if k in ("model", "chat")]), slots)


def _environment(about: Mapping[str, Any], settings: Sequence[str]) -> HermesAgentBaseEnv:
    kind = find_environment(about["class"], [Path(about["folder"]), Path.cwd()])
    env = dict(about["env"])
    env.get("limits", {}).pop("max_turns", None)  # that is env.max_agent_turns
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:  # settings of the run, below those of this call
        file.write(orjson.dumps({"environment": about["class"], "env": env, "openai": about["openai"]}))
        file.flush()
        return load_environment(file.name, settings, kind)


async def _item(env: HermesAgentBaseEnv, about: Mapping[str, Any]) -> Any:
    if about["item"] is not None:
        return env.item_from_json(about["item"])
    if about["mode"] == "evaluate":
        items = list(await env.evaluation_items())
    else:
        items = [await env.get_next_item() for _ in range(_index(about) + 1)]
    found = next((item for item in items if item is not None and env.item_id(item) == about["item_id"]), None)
    if found is None:
        raise ConfigError(f"the environment no longer has the item {about['item_id']}: write item_to_json for it")
    return found


def _index(about: Mapping[str, Any]) -> int:
    return int(about["group_id"].rpartition("-")[2])


def _job(env: HermesAgentBaseEnv, about: Mapping[str, Any], item: Any) -> RolloutJob:
    job = plan_group(env, item, about["group_id"], _index(about), about["temperature"])
    if about["prepared"]:
        job = replace(job, snapshot="recorded", prepared_network=about["prepared_network"])
    return job.for_rollout(about["rollout_id"], replace(job.sampling, seed=about["seed"]))


def first_difference(recorded: RolloutRecord, now: RolloutRecord) -> Divergence | None:
    """Where two records part, measured times left out; None when they are equal byte for byte."""
    before, after = _timeless(orjson.loads(recorded.to_json())), _timeless(orjson.loads(now.to_json()))
    if orjson.dumps(before) == orjson.dumps(after):
        return None
    place, one, other = _part(before, after, "the record")
    return Divergence(place, _shown(one), _shown(other))


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if key not in MEASURED and not key.endswith("/seconds")}
        return {key: _timeless(inner) for key, inner in kept.items()}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


def _part(one: Any, other: Any, place: str) -> tuple[str, Any, Any]:
    """The innermost first place at which two values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if one.get(key) != other.get(key) or (key in one) != (key in other):
                return _part(one.get(key), other.get(key), f"{place}.{key}")
    if isinstance(one, list) and isinstance(other, list):
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            if left != right:
                return _part(left, right, f"{place}[{index}]")
        if len(one) != len(other):
            return f"{place} (lengths)", len(one), len(other)
    return place, one, other


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} ..."
