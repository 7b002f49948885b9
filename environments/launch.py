"""From a config to a running environment: `serve`, `process` and `evaluate`, for `hermes-rl` and for `python -m`.

hermes-rl process terminal_tasks --env.group_size 8
python -m environments.terminal_tasks process --config my.yaml --env.group_size 8
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from pydantic import Field, create_model

from agent_loop import own_process
from environments.config.flags import add_workers, split_settings
from environments.config.loader import load_config
from environments.config.settings import RunConfig, ServerConfig
from environments.config.yaml_file import find_config, harbor_path, read_yaml
from environments.errors import ConfigError, SentenceParser, UsageError, run_command
from environments.printable import printable
from sandbox_pool.errors import did_you_mean

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv

SHIPPED = {
    "terminal_tasks": "environments.terminal_tasks.terminal_env:TerminalTasksEnv",
    "code_tasks": "environments.code_tasks.code_env:CodeTasksEnv",
    "prompts": "environments.prompts:PromptsEnv",
    "harbor": "environments.harbor_tasks:HarborEnv",
    "human_eval": "environments.benchmarks.human_eval:HumanEvalEnv",
    "agentbench_os": "environments.benchmarks.agentbench.agentbench_env:AgentBenchEnv",
    "agentdojo": "environments.benchmarks.agentdojo:AgentDojoEnv",
    "bfcl": "environments.benchmarks.bfcl:BfclEnv",
    "tau2": "environments.benchmarks.tau2:Tau2Env",
    "swe_bench": "environments.benchmarks.swe_bench:SweBenchEnv",
    "reasoning_gym": "environments.benchmarks.reasoning_gym:ReasoningGymEnv",
}
WORKER = "HERMES_RL_WORKER"
"""Set for a worker of `serve`: the descriptor that leads to the process that started it, and its number."""
Config = TypeVar("Config", bound=RunConfig)
VERBS = ("serve", "process", "evaluate")


def load_environment(
    source: str | Path | None, settings: Sequence[str] = (), kind: type[HermesAgentBaseEnv] | None = None
) -> HermesAgentBaseEnv:
    """Build the environment a config describes; `kind` is the class when the caller knows it."""
    kind, config = load_run(source, settings, kind, RunConfig)
    return kind(config.env, config.servers())


def load_run(
    source: str | Path | None, settings: Sequence[str], kind: type[HermesAgentBaseEnv] | None, model: type[Config]
) -> tuple[type[HermesAgentBaseEnv], Config]:
    """The environment's class, and the whole config (`model`) with that environment's own settings.

    hermes-agent's TERMINAL_* variables set what the file and the settings leave open.
    """
    if tasks := harbor_path(source):
        settings = ["--env.tasks", tasks, *settings]
    kind = kind or find_environment(_named_in(source, settings), _folders(source))
    return kind, load_config(_model_of(kind, model), source, settings, os.environ)


def find_environment(name: str, folders: Sequence[Path] = ()) -> type[HermesAgentBaseEnv]:
    """The class of this name; ConfigError names the nearest one when it does not exist.

    A module that is not installed is looked for in `folders`, which an installed command does not search by itself.
    """
    place = SHIPPED.get(name, name)
    module_name, _, class_name = place.partition(":")
    if not class_name:
        raise ConfigError(f"unknown environment {name!r}; {did_you_mean(name, list(SHIPPED))}, or give module:Class")
    for folder in folders:
        if name not in SHIPPED and str(folder) not in sys.path:
            sys.path.append(str(folder))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ConfigError(f"environment {name!r}: there is no module {module_name!r}") from error
    found = getattr(module, class_name, None)
    from environments.base import HermesAgentBaseEnv

    if not (isinstance(found, type) and issubclass(found, HermesAgentBaseEnv)):
        raise ConfigError(f"environment {name!r}: {module_name} has no HermesAgentBaseEnv called {class_name!r}")
    return found


def _folders(source: str | Path | None) -> list[Path]:
    """Where a user's own module may lie: the working directory, and the folder of the config."""
    of_config = [] if source is None else [find_config(source).resolve().parent]
    return [Path.cwd(), *of_config]


def _named_in(source: str | Path | None, settings: Sequence[str]) -> str:
    if source is None:
        raise ConfigError("name a config: a file, or one that ships (see `hermes-rl serve --help`)")
    name = read_yaml(find_config(source)).data.get("environment")
    if not name:
        load_config(RunConfig, source, settings)
        raise ConfigError(f"{source}: `environment` is missing: {', '.join(SHIPPED)}, or module:Class")
    return str(name)


def _model_of(kind: type[HermesAgentBaseEnv], model: type[Config]) -> type[Config]:
    """The model with this environment's own settings, and with what its `config_init` sets as defaults."""
    config, servers = kind.config_init()
    fields: dict[str, Any] = {
        name: (info.annotation, Field(default=getattr(config, name), description=info.description))
        for name, info in type(config).model_fields.items()
        if name in config.model_fields_set
    }
    env = create_model(type(config).__name__, __base__=type(config), **fields)
    return create_model(
        model.__name__,
        __base__=model,
        env=(env, Field(default_factory=env)),
        openai=(ServerConfig | list[ServerConfig], Field(default_factory=lambda: list(servers))),
    )


def run_verb(env: HermesAgentBaseEnv, verb: str, out: Path | None = None, fresh: bool = False, workers: int = 0) -> int:
    """Run one verb to its end; the exit code. SIGTERM ends it in good order."""
    from environments.runs.batch import evaluate_run, process_run

    if verb == "serve":
        if WORKER in os.environ:
            from environments.atropos.workers import work, worker_end

            own_process.run(work(env, *worker_end()))
        else:
            env.worker_count = workers
            own_process.run(env.env_manager())
        return 0
    batch = process_run if verb == "process" else evaluate_run
    return own_process.run(batch(env, out, fresh))


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what is stderr now: a progress bar takes its place while it is drawn, and puts lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """What agents wrote may be part of a message."""
        return printable(super().format(record))


def configure_logging(verbose: bool = False) -> None:
    """Log lines on stderr: ours from INFO on, other libraries' from WARNING on."""
    worker = os.environ.get(WORKER, "").partition(":")[2]
    form = f"%(asctime)s %(levelname).1s {worker and f'worker {worker} '}%(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, datefmt="%H:%M:%S", handlers=[StderrHandler()])
    for package in ("environments", "agent_loop", "sandbox_pool"):
        logging.getLogger(package).setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("atroposlib").setLevel(logging.WARNING)


def command_line(kind: type[HermesAgentBaseEnv], argv: Sequence[str] | None = None) -> int:
    """`python -m environments.<name> serve|process|evaluate [--config FILE] [--env.key value ...]`."""
    name = f"python {Path(sys.argv[0]).name}"

    def work() -> int:
        words, settings = split_settings(sys.argv[1:] if argv is None else argv)
        parser = SentenceParser(prog=name, description=kind.__doc__)
        parser.add_argument("verb", choices=VERBS)
        parser.add_argument("--config", help="YAML file, or the name of a shipped config")
        parser.add_argument("--out", type=Path, help="where process and evaluate write (default runs/NAME)")
        parser.add_argument("--fresh", action="store_true", help="start over instead of resuming")
        add_workers(parser)
        args = parser.parse_args(words)
        if args.workers and args.verb != "serve":
            raise UsageError(f"{args.verb} has no workers: --workers is for serve")
        configure_logging()
        env = load_environment(args.config, settings, kind)
        return run_verb(env, args.verb, args.out, args.fresh, args.workers)

    return run_command(name, work)
