"""`python -m environments.apps.reference_trainer SETTINGS.json`: events as lines of JSON on standard output.

It ends with its parent. On SIGTERM the current step is finished and saved. Exit code 2: the settings are wrong; 1:
run-api or the front failed, or the batch is bad. The reason is one sentence, on stderr and as an `error` event.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent_loop.own_process import end_with_parent
from environments.apps.reference_trainer.trainer import StopRequest
from environments.apps.reference_trainer.trainer_settings import TrainerJob
from sandbox_pool.server.build.helper_build import cache_dir

USAGE = "usage: python -m environments.apps.reference_trainer SETTINGS.json"


def report(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def read_job(arguments: list[str]) -> TrainerJob:
    """The settings, or SystemExit with the reason."""
    if len(arguments) != 1:
        raise SystemExit(USAGE)
    try:
        return TrainerJob.model_validate_json(Path(arguments[0]).read_text())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SystemExit(f"{arguments[0]}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except OSError as error:
        raise SystemExit(f"{arguments[0]}: {error.strerror}") from error


def keep_compiled(folder: Path) -> None:
    """Keep compiled programs between runs: the second starts at full speed."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def main(arguments: list[str]) -> int:
    end_with_parent(os.getppid())
    stop = StopRequest()
    stop.on_signals()
    try:
        job = read_job(arguments)
    except SystemExit as wrong:
        report({"event": "error", "message": str(wrong)})
        sys.stderr.write(f"{wrong}\n")
        return 2
    keep_compiled(job.compilation_cache or cache_dir() / "jax")
    from environments.apps.reference_trainer.checkpoint import CheckpointMismatch
    from environments.apps.reference_trainer.llama import UnsupportedModel
    from environments.apps.reference_trainer.rows import BadBatch
    from environments.apps.reference_trainer.trainer import Trainer
    from environments.apps.reference_trainer.trainer_api import RequestFailed

    try:
        Trainer(job, report, stop).run()
    except (RequestFailed, BadBatch, CheckpointMismatch, UnsupportedModel) as error:
        report({"event": "error", "message": str(error)})
        sys.stderr.write(f"{error}\n")
        return 1 if isinstance(error, RequestFailed | BadBatch) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
