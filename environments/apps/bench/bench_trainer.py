"""A trainer for `bench serve`, in a process of its own: registers, then pulls batches and throws them away."""

from __future__ import annotations

import sys
import time

from environments.apps.reference_trainer.trainer_api import call

PAUSE_S = 0.05
TIMEOUT_S = 300.0
UNCOMPRESSED = {"Accept-Encoding": "identity"}
"""As trainers should ask."""


def main(url: str, batch_size: int, batches: int) -> None:
    """Pull so many batches."""
    names = {"wandb_group": "bench", "wandb_project": "bench", "checkpoint_dir": ""}
    numbers = {"max_token_len": -1, "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": batches}
    call("POST", f"{url}/register", {**names, **numbers, "batch_size": batch_size}, timeout_s=TIMEOUT_S)
    got = 0
    while got < batches:
        if call("GET", f"{url}/batch", headers=UNCOMPRESSED, timeout_s=TIMEOUT_S)["batch"]:
            got += 1
        else:
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
