"""NeMo Gym's own collector asks our server for rollouts, and its own types take them. See prepare.sh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.model.tokens.ledger import MASKED
from agent_loop.records.record import RolloutRecord
from environments.trainers.item_rows import nemo_gym_rows

HOME = Path(__file__).resolve().parents[3] / ".tools" / "nemo-gym"
LEVELS = ("--env.levels", "[0,1]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="no NeMo Gym: bash tests/live/nemo_gym/prepare.sh"),
]

COLLECT = """
import asyncio, json, os, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Head(BaseHTTPRequestHandler):
    "The head server of NeMo Gym, which tells where agents are."
    def do_GET(self):
        body = os.environ["NEMO_GYM_CONFIG_DICT"].encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass

head = HTTPServer(("127.0.0.1", 0), Head)
threading.Thread(target=head.serve_forever, daemon=True).start()
agent = {"host": "127.0.0.1", "port": int(sys.argv[1])}
os.environ["NEMO_GYM_CONFIG_DICT"] = json.dumps({
    "head_server": {"host": "127.0.0.1", "port": head.server_port},
    "hermes": {"responses_api_agents": {"hermes": agent}}})

from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.openai_utils import TokenIDLogProbMixin
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper

for line in Path("rows.jsonl").read_text().splitlines():
    BaseRunRequest.model_validate_json(line)
config = RolloutCollectionConfig(
    input_jsonl_fpath="rows.jsonl", output_jsonl_fpath="out.jsonl", num_repeats=3, num_samples_in_parallel=4)
results = asyncio.run(RolloutCollectionHelper().run_from_config(config))
found = []
for result in results:
    taken = BaseVerifyResponse.model_validate(result)
    trained = [
        [item.prompt_token_ids, item.generation_token_ids, item.generation_log_probs]
        for item in taken.response.output if isinstance(item, TokenIDLogProbMixin)]
    found.append([result["rollout_id"], taken.reward, trained])
print(json.dumps(found))
"""


@pytest.fixture
def port(tmp_path: Path) -> Iterator[str]:
    """Of an offered environment."""
    command = [str(Path(sys.executable).with_name("hermes-rl")), "offer", "terminal_tasks", "--to", "nemo-gym", *LEVELS]
    command += ["--env.data_path_to_save_groups", "kept.jsonl"]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().rsplit(":", 1)[-1].strip()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_the_collector_gets_finished_episodes_with_exact_tokens(port: str, tmp_path: Path) -> None:
    rows = nemo_gym_rows("terminal_tasks", 4, LEVELS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [str(HOME / "venv/bin/python"), "-c", COLLECT, port]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[tuple[str, float, Any]] = json.loads(done.stdout.splitlines()[-1])
    lines = (tmp_path / "kept.jsonl").read_bytes().splitlines()
    records = {record.rollout_id: record for record in map(RolloutRecord.from_json, lines)}
    assert len(found) == len(records) == 12
    assert max(reward for _, reward, _ in found) == 1.0
    for rollout_id, reward, trained in found:
        record = records[rollout_id]
        assert reward == record.score
        assert trained == [[call.prompt_ids, call.sampled_ids, call.logprobs] for call in record.sampled_calls]
        kept = sum(mask != MASKED for segment in record.segments for mask in segment.masks)
        assert sum(len(sampled) for _, sampled, _ in trained) == kept > 0
    [told] = json.loads((tmp_path / "out_aggregate_metrics.json").read_text())
    mean = sum(reward for _, reward, _ in found) / 12
    assert told["key_metrics"] == {"rollouts": 12, "lost": 0, "mean/reward": pytest.approx(mean)}
