"""Further models of a run: a judge that scores, and a user who answers the agent.

Each is a server of its own, asked with retries, from a cache where it can, and counted apart from the policy. A role
that cannot be asked raises `RoleAway`, which loses the rollout: it is never a score. A judge's verdict is a JSON object
with a token that follows from the whole question: nothing that the one who is judged writes can contain it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from agent_loop.model.contract import ContextTooLong, Message, ModelError, ModelServer, ModelTurn, Sampling
from agent_loop.model.errors import RetryPolicy, translate, with_retries
from environments.config.settings import JudgeConfig, RoleConfig, UserConfig
from environments.runs.store import write_whole
from environments.scoring.verification import AgentFault, Verdict

REMEMBERED = 10_000
"""Answers of a judge that are kept in memory."""
UNREADABLE_TRIES = 3
"""Times one vote is asked for again when its answer holds no verdict."""
SEVERAL_VOTES_TEMPERATURE = 0.7
_MARKUP = re.compile(r"[<>]|\[(?=/?[A-Z_]+\])")
"""Characters that begin or end what chat templates use as marks."""


class RoleAway(ModelError):
    """The judge or the user could not be asked, or gave no answer that can be read. The rollout is lost."""


@dataclass
class RoleUse:
    """What one rollout asked of one role."""

    requests: int = 0
    """Answers that the server was asked for."""
    cached: int = 0
    """Answers that were known already."""
    retries: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cost: float = 0.0
    """By the prices in the config."""
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    """Each verdict of a judge: its score, the votes, their agreement and reasons."""


class Role:
    """One server, asked by every rollout of a run."""

    def __init__(self, name: str, server: ModelServer, config: RoleConfig) -> None:
        self.name = name
        self.config = config
        self._server = server
        self._at_once = asyncio.Semaphore(config.at_once)
        self._remembered: dict[str, str] = {}

    async def ask(self, messages: Sequence[Message], sampling: Sampling, use: RoleUse, key: str | None = None) -> str:
        """The answer's text. With a `key` it may come from the cache, and goes there."""
        if key is not None and (known := await self._known(key)) is not None:
            use.cached += 1
            return known

        def count_retry() -> None:
            use.retries += 1

        async def sample() -> ModelTurn:
            try:
                return await self._server.open(list(messages), []).sample(sampling)
            except Exception as error:  # whatever a client library raises becomes a model error
                raise translate(error) from error

        try:
            async with self._at_once:
                turn = await with_retries(sample, RetryPolicy(attempts=self.config.tries), on_failure=count_retry)
        except ModelError as error:
            raise RoleAway(f"the {self.name} is away: {error}") from error
        self._count(turn, use)
        if key is not None:
            await self._remember(key, turn.content)
        return turn.content

    def _count(self, turn: ModelTurn, use: RoleUse) -> None:
        read, written = turn.prompt_tokens or 0, turn.sampled_tokens or 0
        use.requests += 1
        use.prompt_tokens += read
        use.sampled_tokens += written
        use.cost += (read * self.config.prompt_price + written * self.config.sampled_price) / 1e6

    async def _known(self, key: str) -> str | None:
        if key in self._remembered or self.config.cache is None:
            return self._remembered.get(key)
        try:
            return str(json.loads(await asyncio.to_thread(self._file(self.config.cache, key).read_bytes))["answer"])
        except (OSError, ValueError, KeyError):
            return None  # never asked, or torn by a full disk: ask again

    async def _remember(self, key: str, answer: str) -> None:
        self._remembered[key] = answer
        while len(self._remembered) > REMEMBERED:
            self._remembered.pop(next(iter(self._remembered)))
        if self.config.cache is not None:
            data = json.dumps({"model": self.config.model_name, "answer": answer}).encode()
            await asyncio.to_thread(write_whole, self._file(self.config.cache, key), data)

    def forget(self, key: str) -> None:
        """Drop an answer that turned out to be useless."""
        self._remembered.pop(key, None)
        if self.config.cache is not None:
            self._file(self.config.cache, key).unlink(missing_ok=True)

    @staticmethod
    def _file(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}.json"


class RolloutRoles:
    """The roles as one rollout uses them, and what it used."""

    def __init__(self, judge: Role | None, user: Role | None, seed: int | None) -> None:
        self._judge = judge
        self._user = user
        self._seed = seed
        self.uses: dict[str, RoleUse] = {}
        self.away: RoleAway | None = None
        """Set once a role could not be asked: whatever the caller makes of it, the rollout is lost."""

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """For the record."""
        return {name: asdict(use) for name, use in self.uses.items()}

    def _use(self, name: str) -> RoleUse:
        return self.uses.setdefault(name, RoleUse())

    async def judge(self, rubric: str, material: Mapping[str, Any], points: int, votes: int | None) -> Verdict:
        """Ask the judge, several times where that is wanted."""
        role = self._judge
        if role is None or not isinstance(role.config, JudgeConfig):
            raise RuntimeError("there is no judge: set env.judge (a server, such as env.judge.base_url)")
        if not material:
            raise ValueError("ctx.judge was given nothing to judge: name it, as in ctx.judge(rubric, answer=text)")
        use, wanted = self._use("judge"), votes or role.config.votes
        chars = role.config.max_material_chars
        question = _Question(rubric, quoted(material, chars), points, quoted(dict.fromkeys(material, ""), chars))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_vote(role, question, number, wanted, use)) for number in range(wanted)]
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            self.away = first if isinstance(first, RoleAway) else self.away
            raise first from None
        given = [task.result() for task in tasks]
        scores = [score for score, _ in given]
        reasons = tuple(why for _, why in given)
        verdict = Verdict(math.fsum(scores) / len(scores), reasons=reasons, agreement=agree(scores))
        use.verdicts.append(
            {
                "score": verdict.score,
                "votes": scores,
                "agreement": verdict.agreement,
                "reasons": list(verdict.reasons),
            }
        )
        return verdict

    async def reply(self, instructions: str, messages: Sequence[Message]) -> str | None:
        """What the simulated user answers; None when they are done, or have said as much as they may."""
        role = self._user
        if role is None or not isinstance(role.config, UserConfig):
            raise RuntimeError("there is no user: set env.user (a server), or write `user_reply`")
        use, config = self._use("user"), role.config
        said = use.requests + use.cached
        if said >= config.max_replies:
            return None
        seed = None if self._seed is None else self._seed + said
        texts = _texts()
        told = [{"role": "system", "content": texts["user"].format(instructions=instructions, end=config.end)}]
        heard = [*told, {"role": "user", "content": texts["user_start"]}, *as_the_user_sees(messages)]
        sampling = Sampling(
            0.7 if config.temperature is None else config.temperature,
            config.max_tokens,
            seed=seed,
            extra_body=config.extra_body,
        )
        key = _key(config, heard, seed) if config.cache is not None else None
        try:
            answer = await role.ask(heard, sampling, use, key)
        except RoleAway as error:
            self.away = error
            raise
        answer = answer.strip()
        return None if not answer or config.end in answer else answer


def as_the_user_sees(messages: Sequence[Message]) -> list[Message]:
    """The conversation from the other side: what was said, without system texts, calls and their results."""
    seen: list[Message] = []
    other = {"user": "assistant", "assistant": "user"}
    for message in messages:
        text, role = message.get("content"), other.get(str(message.get("role")))
        if role is None or not isinstance(text, str) or not text.strip():
            continue
        if seen and seen[-1]["role"] == role:
            seen[-1] = {"role": role, "content": f"{seen[-1]['content']}\n\n{text}"}
        else:
            seen.append({"role": role, "content": text})
    return seen


@dataclass(frozen=True)
class _Question:
    rubric: str
    material: str
    points: int
    nothing: str
    """The material as it is of a rollout that gave nothing to judge."""

    def token(self, vote: int) -> str:
        """Follows from the material, so no material can contain it."""
        said = json.dumps([self.rubric, self.material, self.points, vote])
        return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def messages(self, token: str) -> list[Message]:
        texts = _texts()
        asked = texts["judge"].format(rubric=self.rubric, material=self.material, points=self.points, token=token)
        return [{"role": "system", "content": texts["judge_system"]}, {"role": "user", "content": asked}]


async def _vote(role: Role, question: _Question, number: int, votes: int, use: RoleUse) -> tuple[float, str]:
    """One vote as a share of the points, and its reasons.

    A judge that reads the same question about no work, and not this one, was kept from it by the work.
    """
    verdict, answer = await _asked(role, question, number, votes, use)
    if verdict is not None:
        return verdict
    said = f"the judge gave no verdict in {UNREADABLE_TRIES} answers; the last one: {answer[:200]!r}"
    if (await _asked(role, replace(question, material=question.nothing), number, votes, use))[0] is not None:
        raise AgentFault(f"{said}; without the work it gives one")
    raise RoleAway(said)


async def _asked(
    role: Role, question: _Question, number: int, votes: int, use: RoleUse
) -> tuple[tuple[float, str] | None, str]:
    """The verdict, if there was one, and the last answer."""
    token, config = question.token(number), role.config
    temperature = config.temperature
    if temperature is None:
        temperature = 0.0 if votes == 1 else SEVERAL_VOTES_TEMPERATURE
    answer = ""
    for attempt in range(UNREADABLE_TRIES):
        seed = int(token[:7], 16) + attempt
        extra = {**verdict_grammar(config.server_type, token, question.points), **config.extra_body}
        heat = temperature if attempt == 0 else max(temperature, 0.5)  # else the same answer would come again
        sampling = Sampling(heat, config.max_tokens, seed=seed, extra_body=extra)
        messages = question.messages(token)
        key = _key(config, messages, seed)
        try:
            answer = await role.ask(messages, sampling, use, key)
        except RoleAway as error:
            if isinstance(error.__cause__, ContextTooLong):
                return None, str(error)
            raise
        verdict = read_verdict(answer, token, question.points)
        if verdict is not None:
            return verdict, answer
        role.forget(key)
    return None, answer


def read_verdict(text: str, token: str, points: int) -> tuple[float, str] | None:
    """The verdict in a judge's answer: the one object with our token. What the judge quotes from the work has none."""
    found: set[tuple[float, str]] = set()
    decoder = json.JSONDecoder(strict=False)
    for brace in re.finditer(r"\{", text):
        try:
            value, _ = decoder.raw_decode(text, brace.start())
        except (ValueError, RecursionError):
            continue
        if not isinstance(value, dict) or value.get("verdict") != token:
            continue
        given = value.get("points")
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= points:
            return None
        found.add((given / points, str(value.get("reasons", ""))))
    return found.pop() if len(found) == 1 else None


def verdict_grammar(server_type: str, token: str, points: int) -> dict[str, Any]:
    """What makes a server write nothing but a verdict, where it is known how to ask for that."""
    if server_type not in ("llamacpp", "cpu-model"):
        return {}
    properties = {
        "verdict": {"const": token},
        "reasons": {"type": "string", "maxLength": 200},
        "points": {"type": "integer", "minimum": 0, "maximum": points},
    }
    return {"json_schema": {"type": "object", "properties": properties, "required": list(properties)}}


def quoted(material: Mapping[str, Any], max_chars: int) -> str:
    """The work as JSON in which no mark of a chat template can stand; a long text is cut in the middle."""

    def as_text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, default=str)

    cut = {name: _cut(as_text(value), max_chars) for name, value in material.items()}
    text = json.dumps(cut, ensure_ascii=False, indent=1).encode("utf-8", "replace").decode()
    return _MARKUP.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def agree(scores: Sequence[float]) -> float | None:
    """1 less the mean difference between two votes: 1 when all are the same; None of a single vote."""
    pairs = [abs(a - b) for a, b in combinations(scores, 2)]
    return 1.0 - math.fsum(pairs) / len(pairs) if pairs else None


def _key(config: RoleConfig, messages: Sequence[Message], seed: int | None) -> str:
    server = config.model_dump(
        mode="json", include={"server_type", "base_url", "model_name", "temperature", "extra_body"}
    )
    asked = json.dumps([server, list(messages), seed], sort_keys=True, default=str)
    return hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()


@cache
def _texts() -> dict[str, str]:
    loaded: dict[str, str] = yaml.safe_load(files("environments").joinpath("role_prompts.yaml").read_text("utf-8"))
    return loaded
