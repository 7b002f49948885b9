"""A trainer for `bench serve`, in a process of its own: registers, then pulls batches and throws them away."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

PAUSE_S = 0.05


def call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One request to run-api; uncompressed, as trainers should ask."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def main(url: str, batch_size: int, batches: int) -> None:
    """Pull so many batches."""
    names = {"wandb_group": "bench", "wandb_project": "bench", "checkpoint_dir": ""}
    numbers = {"max_token_len": -1, "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": batches}
    call(f"{url}/register", {**names, **numbers, "batch_size": batch_size})
    got = 0
    while got < batches:
        if call(f"{url}/batch")["batch"]:
            got += 1
        else:
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
