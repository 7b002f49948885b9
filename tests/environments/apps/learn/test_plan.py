"""The plan of a run: what cannot work is refused, the rest becomes settings of the processes."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from environments.apps.learn.plan import LearnPlan, LearnRunConfig
from environments.apps.learn.trl_trainer import half_of_the_cores
from environments.errors import UsageError
from environments.launch import load_run
from support.learn_program import tiny_config


def test_a_plan_that_cannot_work_is_refused_in_one_sentence(tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed (extra cpu-model)")
    source = tiny_config(tmp_path / "a.yaml")

    def plan(*settings: str) -> LearnPlan:
        kind, config = load_run(source, settings, None, LearnRunConfig)
        return LearnPlan(kind, config, tmp_path / "out")

    with pytest.raises(UsageError, match="cpu-model"):
        plan("--openai.server_type", "standin")
    with pytest.raises(UsageError, match="rollout_timeout_s is 60 s"):
        plan("--env.limits.rollout_timeout_s", "60")
    good = plan("--trainer.control", "shuffled")
    job = good.trainer_job("http://a", "http://b", Path("m.gguf"), tmp_path, False)
    assert (job.control, job.batch_size, job.max_token_len) == ("shuffled", 4, 501)
    server = good.server("http://b", Path("m.gguf"))
    serve = orjson.loads(orjson.dumps(good.rollout_config(server, tmp_path / "rollouts.jsonl", "http://a")))
    assert serve["env"]["extra_body"] == {"hermes_group": 2}
    assert serve["env"]["max_num_workers"] == 2
    tracked = plan("--env.trackers", '["wandb"]').rollout_config(server, tmp_path / "rollouts.jsonl", "http://a")
    assert tracked["env"]["trackers"] == []  # `learn` tells them, once


def test_trl_samples_from_exact_weights_and_refuses_settings_that_it_has_no_use_for(tmp_path):
    source = tiny_config(tmp_path / "a.yaml")

    def plan(*settings: str) -> LearnPlan:
        kind, config = load_run(source, settings, None, LearnRunConfig)
        return LearnPlan(kind, config, tmp_path / "out", by="trl")

    with pytest.raises(UsageError, match=r"trainer\.std_floor is the reference trainer's"):
        plan("--trainer.std_floor", "0.1")
    good = plan()
    assert good.model_options["weights"] == "F16"
    assert good.model_options["threads"] == 1  # as the config has it; without one, half of the cores
    [server] = good.config.servers()
    server.options.pop("threads")
    assert good.model_options["threads"] == half_of_the_cores()
    config = good.rollout_config(good.server("http://b", Path("m.gguf")), tmp_path / "rollouts.jsonl")
    assert "rollout_server_url" not in config["env"]
    assert config["env"]["data_path_to_save_groups"] == str(tmp_path / "rollouts.jsonl")
    job = good.trl_job(tmp_path / "serve.yaml", "http://b", Path("m.gguf"), tmp_path)
    assert (job.rollouts, job.steps) == (tmp_path / "serve.yaml", good.config.trainer.steps)
