"""The newest transformers, openai and wandb with atroposlib 0.4.0."""

from __future__ import annotations

import inspect
import logging
import re

import pytest
from atroposlib.envs.base import APIServerConfig, BaseEnv
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from environments.atropos.atropos_env import MetricsLog
from environments.atropos.compat import plain_chat_template, usable_api_key, wandb_obstacle
from support.atropos_envs import NumberedEnv


def small_tokenizer() -> PreTrainedTokenizerFast:
    model = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2, "user": 3}, unk_token="[UNK]"))
    model.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    return tokenizer


def test_the_chat_template_gives_plain_ids() -> None:
    tokenizer = plain_chat_template(plain_chat_template(small_tokenizer()))
    messages = [{"role": "user", "content": "a b"}]
    assert tokenizer.apply_chat_template(messages) == [3, 1, 2]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "user a b "
    assert "input_ids" in tokenizer.apply_chat_template(messages, return_dict=True)


def test_an_empty_key_becomes_one_that_openai_accepts() -> None:
    assert usable_api_key("") == usable_api_key(None) == "none"
    assert usable_api_key("sk-1") == "sk-1"


def test_the_server_manager_opens_with_an_empty_key_and_only_when_used() -> None:
    env = NumberedEnv()
    env.server_configs = [APIServerConfig(base_url="http://127.0.0.1:9/v1", api_key="", health_check=False)]
    assert "server" not in vars(env)
    assert len(env.server.servers) == 1


def test_a_bare_server_config_is_refused_because_atroposlib_would_ignore_its_url() -> None:
    env = NumberedEnv()
    env.server_configs = APIServerConfig(base_url="http://127.0.0.1:9/v1")
    with pytest.raises(TypeError, match="must be a list"):
        _ = env.server


def test_wandb_is_used_only_when_it_can_be() -> None:
    assert wandb_obstacle({"WANDB_MODE": "offline"}) is None
    assert wandb_obstacle({"WANDB_API_KEY": "k"}) is None
    obstacle = wandb_obstacle({})
    assert obstacle is None or "wandb" in obstacle


async def test_wandb_joins_the_trainers_group_under_the_environments_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Run:
        def log(self, metrics: dict[str, float], step: int) -> None:
            seen.append((metrics, step))

        def finish(self) -> None:
            seen.append("finished")

    class Api:
        async def wandb_info(self) -> tuple[str, str]:
            return "g", "p"

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("wandb.init", lambda **options: seen.append(options) or Run())
    metrics = MetricsLog()
    assert await metrics.open(Api(), True, "env_0", {"seed": 1}) == ("g", "p")  # type: ignore[arg-type]
    metrics.write({"score": 1.0}, 3)
    metrics.close()
    joined = {"name": "env_0", "project": "p", "group": "g", "config": {"seed": 1}}
    assert seen == [joined, ({"env_0_score": 1.0}, 3), "finished"]


def test_the_log_says_what_matters_of_a_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        MetricsLog().write({"rollouts/verifier_score": 0.58333, "rollouts/metrics/turns": 2.0, "hacks/rate": 0.0}, 3)
    assert [record.getMessage() for record in caplog.records] == ["step 3: score 0.5833, proven hacks 0"]


async def test_wandb_not_logged_in_is_one_line_and_no_crash(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("environments.atropos.atropos_env.wandb_obstacle", lambda: "wandb is not logged in")
    metrics = MetricsLog()
    with caplog.at_level(logging.WARNING):
        assert await metrics.open(None, True, "x", {}) == (None, None)  # type: ignore[arg-type]
    metrics.write({"score": 1.0}, 3)
    metrics.close()
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == ["wandb is not logged in"]


def test_every_attribute_of_base_env_exists() -> None:
    """BaseEnv.__init__ is not called (it loads a tokenizer from the hub): what it sets must be there all the same."""
    names = set(re.findall(r"self\.(\w+)\s*(?::[^=]+)?=[^=]", inspect.getsource(BaseEnv.__init__)))
    env = NumberedEnv()
    lazy = {"server", "tokenizer"}
    assert {name for name in names - lazy if not hasattr(env, name)} == set()
    assert all(hasattr(type(env), name) for name in lazy)
    assert {"workers", "backlog", "curr_step"} <= names, "the pattern no longer reads BaseEnv.__init__"


def test_checkpoints_keep_what_the_environment_asks_to_keep(tmp_path: object) -> None:
    class Keeping(NumberedEnv):
        cursor = 0

        def checkpoint_state(self) -> dict[str, int]:
            return {"cursor": self.cursor}

        def restore_checkpoint(self, state: dict[str, int]) -> None:
            self.cursor = state["cursor"]

    old, new = Keeping(), Keeping()
    for env in (old, new):
        env.checkpoint_dir, env.wandb_prepend, env.checkpoint_interval = str(tmp_path), "x_0", 5
    old.cursor = 42
    old._checkpoint(7)
    new.curr_step = 5
    new.load_checkpoint()
    assert new.cursor == 42
