"""Every bad input is answered with one sentence and exit code 2, and nothing is half-done."""

import os
import shlex
import subprocess
import sys

import pytest

from environments.apps.cli.main import main
from support.env_records import record

FAST = "--env.total_steps 1 --env.group_size 1 --out o"
"""Whatever slips through a check ends soon."""

ROWS = {
    # The command itself
    "": "required: VERB",
    "prcess terminal_tasks": "invalid choice: 'prcess'",
    "--nope": "required: VERB",
    "verify run/rollouts.jsonl --nope": "unrecognized arguments: --nope",
    "verify run/rollouts.jsonl --env.group_size 4": "verify takes no settings such as --env.group_size",
    "process": "required: CONFIG",
    "process terminal_tasks extra": "unrecognized arguments: extra",
    "train-check demo --model x": "required: --trainer",
    "train-check demo --trainer nosuch --model x": "invalid choice: 'nosuch'",
    "train-check demo --trainer trl --model x": "trl cannot be imported: pip install 'hermes-rl[trl]'",
    "train-check demo --trainer trl --model x --groups 0": "too small: at least 1",
    "process terminal_tasks --env.trackers '[\"nosuch\"]'": "env.trackers",
    "process terminal_tasks --env.trackers '[\"mlflow\"]'": "pip install 'hermes-rl[mlflow]'",
    "offer terminal_tasks": "required: --to",
    "offer nosuch --to nemo-gym": "no config file 'nosuch'",
    "offer terminal_tasks --to nosuch": "invalid choice: 'nosuch'",
    "offer terminal_tasks --to openenv": "openenv cannot be imported: pip install 'hermes-rl[openenv]'",
    "learn --trainer nosuch": "invalid choice: 'nosuch'",
    "learn --trainer trl": "cannot be imported: `pip install ",
    "learn --trainer trl --resume": "leave them out with --trainer trl",
    # Replay
    "replay": "required: RUN",
    "replay nosuch x": "there is no run nosuch",
    "replay afolder x": "afolder has no cassettes: record some with --env.cassettes true",
    "replay list.yaml": "list.yaml is not a cassette",
    "replay list.yaml x": "is a cassette, which holds one rollout: name no other",
    "process terminal_tasks --env.cassettes maybe": "env.cassettes",
    # Images
    "pool images": "required: VERB",
    "pool images pull": "required: image",
    "pool images pull /tmp": "is a folder",
    "pool images pull Not/AName": "is not the name of an image",
    "pool images pull oci:": "names nothing",
    "pool images pull oci:nosuch": "cannot be read",
    "pool images pull dockerfile:nosuch": "there is no Dockerfile",
    "pool images pull x --mirror nope": "is not HOST=URL",
    "pool images gc --max-gb -1": "--max-gb",
    "pool check --image Not/AName": "is not the name of an image",
    # Configs
    "process nosuch": "no config file 'nosuch'",
    "process terminal_task": "did you mean 'terminal_tasks'?",
    "process afolder": "afolder is a folder",
    "process list.yaml": "list.yaml:1: a config is a mapping",
    "process broken.yaml": "broken.yaml:3: not valid YAML",
    "process twice.yaml": "twice.yaml:3: 'env' is set twice, first in line 2",
    "process binary.yaml": "cannot read binary.yaml",
    "process empty.yaml": "`environment` is missing",
    "process unknown_env.yaml": "unknown environment 'terminal_taks'; did you mean 'terminal_tasks'?",
    "process no_module.yaml": "there is no module 'nosuchmodule'",
    "process no_class.yaml": "json has no HermesAgentBaseEnv called 'JSONDecoder'",
    "process unknown_key.yaml": "unknown_key.yaml:3: unknown key 'grup_size' in 'env'; did you mean 'group_size'?",
    "process unknown_pool_key.yaml": "unknown_pool_key.yaml:4: unknown key 'min_host' in 'env.pool'; did you mean",
    "process bad_value.yaml": "bad_value.yaml:3: env.group_size: input should be greater than or equal to 1 (got 0)",
    "process true_for_number.yaml": "true_for_number.yaml:3: env.group_size is a number, not true or false",
    "evaluate": "name a config",
    "evaluate nosuch": "no config file 'nosuch'",
    "serve nosuch": "no config file 'nosuch'",
    "config nosuch": "no config file 'nosuch'",
    "config unknown_key.yaml": "did you mean 'group_size'?",
    "doctor --config nosuch": "no config file 'nosuch'",
    "doctor --config ''": "no config file ''",
    "doctor --config unknown_key.yaml": "did you mean 'group_size'?",
    # Flags
    "process terminal_tasks --env.group_size --out o": "flag --env.group_size: it needs a value",
    "process terminal_tasks --env.system_prompt --out o": "flag --env.system_prompt: it needs a value",
    "process terminal_tasks --env.grup_size 4": "unknown key 'grup_size' in 'env'; did you mean 'group_size'?",
    "process terminal_tasks --envv.group_size 4": "unknown key 'envv'; did you mean 'env'?",
    "process terminal_tasks --env.group_size.x 4": "--env.group_size.x: 'x' cannot be set below a single value",
    "process terminal_tasks --openai.2.base_url x": "flag --openai.2.base_url: ",
    # Settings of an environment
    "process terminal_tasks --env.group_size 0": "greater than or equal to 1 (got 0)",
    "process terminal_tasks --env.group_size -1": "greater than or equal to 1 (got -1)",
    "process terminal_tasks --env.group_size four": "valid integer",
    "process terminal_tasks --env.group_size 1.5": "valid integer",
    "process terminal_tasks --env.group_size true": "flag --env.group_size: env.group_size is a number",
    "process terminal_tasks --env.total_steps -3": "greater than or equal to -1 (got -3)",
    "process terminal_tasks --env.total_steps -1": "env.total_steps is -1: process needs to know",
    "process terminal_tasks --env.total_steps 0": "env.total_steps is 0: process needs to know",
    "process terminal_tasks --env.max_token_length 0": "greater than 0 (got 0)",
    "process terminal_tasks --env.max_token_length -5": "greater than 0 (got -5)",
    "process terminal_tasks --env.max_token_length 1e20": "valid integer",
    "process terminal_tasks --env.max_token_length 1.0e+20": "exceeded maximum size (got 1e+20)",
    "process terminal_tasks --env.max_token_length 200000000": "less than or equal to 100000000",
    "process terminal_tasks --env.max_tokens_per_turn 0": "greater than 0 (got 0)",
    "process terminal_tasks --env.max_token_length 4096 --env.max_tokens_per_turn 4096": "leaves no room for a prompt",
    "process terminal_tasks --env.max_context_tokens 0": "greater than 0",
    "process terminal_tasks --env.max_agent_turns 0": "greater than or equal to 1 (got 0)",
    "process terminal_tasks --env.limits.max_turns 3": "set `max_agent_turns`",
    "process terminal_tasks --env.limits.max_turn 3": "did you mean 'max_turns'?",
    "process terminal_tasks --env.levels '[0,99]'": "there is no level 99: levels are 0 to 4",
    "process terminal_tasks --env.levels '[-1]'": "there is no level -1",
    "process terminal_tasks --env.levels high": "valid list",
    "process terminal_tasks --env.categories '[fles]'": "unknown terminal task category 'fles'",
    "process terminal_tasks --env.kinds '[nosuch]'": "unknown terminal task kind 'nosuch'",
    "process terminal_tasks --env.split test": "'train' or 'eval'",
    "process terminal_tasks --env.enabled_toolsets '[termnal]'": "did you mean 'terminal'?",
    "process terminal_tasks --env.disabled_toolsets '[nosuch]'": "unknown toolset or tool 'nosuch'",
    "process terminal_tasks --env.enabled_toolsets '[todo]' --env.disabled_toolsets '[todo]'": "no tools are enabled",
    "process terminal_tasks --env.distribution nosuch": "unknown distribution 'nosuch'",
    "process terminal_tasks --env.distribution safe --env.enabled_toolsets '[todo]'": "not both",
    "process terminal_tasks --env.tool_call_parser hermess": "hermess",
    "process terminal_tasks --env.agent_temperature -1": "greater than or equal to 0",
    "process terminal_tasks --env.eval_temperature -1": "greater than or equal to 0",
    "process terminal_tasks --env.terminal_timeout 0": "greater than 0",
    "process terminal_tasks --env.terminal_lifetime 0": "greater than 0",
    "process terminal_tasks --env.segments some": "flag --env.segments",
    "process terminal_tasks --env.advantages some": "'mean' or 'normalized'",
    "process terminal_tasks --env.verification some": "'workspace', 'layer' or 'live'",
    "process terminal_tasks --env.rollout_tries 0": "greater than or equal to 1",
    "process terminal_tasks --env.group_deadline_s 0": "greater than 0",
    "process terminal_tasks --env.groups_at_once 0": "greater than or equal to 1",
    "process terminal_tasks --env.max_agent_turns 99999999999999999999": "is at most 9007199254740992",
    "process terminal_tasks --env.limits.turn_timeout_s inf": "is a finite number (got inf)",
    "process terminal_tasks --env.inference_weight nan": "is a finite number (got nan)",
    "process terminal_tasks --env.levels '[99999999999999999999]'": "there is no level",
    "process huge_number.yaml": "huge_number.yaml:4: env.sandbox.pids is at most 9007199254740992",
    "process terminal_tasks --env.system_prompt \0": "env.system_prompt holds a character that no text has",
    "process terminal_tasks --env.rewards.recipe []": "unknown reward recipe []",
    "process terminal_tasks --env.rewards.nosuch 1": "unknown key 'nosuch' in 'env.rewards'",
    "process terminal_tasks --env.sandbox.memry_mb 1": "did you mean 'memory_mb'?",
    "process terminal_tasks --env.sandbox.memory_mb -1": "flag --env.sandbox.memory_mb",
    "process terminal_tasks --env.sandbox.network internet": "it is none, egress, host, or hosts as in {allow:",
    "process terminal_tasks --env.sandbox.network.alow [a.org]": "did you mean 'allow'?",
    "process terminal_tasks --env.sandbox.network.allow ['http://a.org/']": "leave out the scheme and the path",
    "process terminal_tasks --env.sandbox.network.allow [10.0.0.1]": "cannot be allowed: it is a private address",
    "process terminal_tasks --env.sandbox.network.prepare all": "it is egress or a list of hosts",
    "process terminal_tasks --env.sandbox.mounts '[{source: data, target: /data}]'": "a mount needs absolute paths",
    "process terminal_tasks --env.sandbox.mounts '[{source: /usr, target: /proc}]'": "mount to another folder",
    "process terminal_tasks --env.sandbox.login maybe": "env.sandbox.login: input should be a valid boolean",
    "process terminal_tasks --env.prepare_cache_mb -1": "greater than or equal to 0 (got -1)",
    "evaluate terminal_tasks --env.eval_items -1": "greater than or equal to 0",
    "evaluate terminal_tasks --env.eval_items 0 --out o": "no evaluation items",
    "evaluate terminal_tasks --env.eval_samples 0": "greater than or equal to 1",
    "process code_tasks --env.dataset_name nosuch --out o": "unknown source 'nosuch'",
    "process code_tasks --env.dataset_name nosuch.jsonl --out o": "nosuch.jsonl",
    "process prompts": "env.dataset is missing",
    "process harbor": "env.tasks is missing",
    "evaluate agentdojo": "needs the package agentdojo: pip install 'hermes-rl[agentdojo]'",
    "evaluate agentbench_os": "needs the package inspect_evals: pip install 'hermes-rl[agentbench-os]'",
    "evaluate bfcl": "pip install --no-deps bfcl-eval",
    "evaluate tau2": "needs the package inspect_evals: pip install 'hermes-rl[tau2]'",
    "evaluate tau2 --env.domains [bakery]": "'airline' or 'retail'",
    "evaluate reasoning_gym": "needs the package reasoning_gym: pip install 'hermes-rl[reasoning-gym]'",
    "oracle nosuch": "no config file 'nosuch'",
    "oracle": "CONFIG",
    "process harbor:": "no config file 'harbor:'",
    "process harbor:nosuch": "env.tasks: there is no folder 'nosuch'",
    "process harbor:afolder": "env.tasks: no task in 'afolder'",
    "process harbor:afolder --env.tsks x": "did you mean 'tasks'?",
    "process prompts --env.dataset nosuch.jsonl": "cannot read nosuch.jsonl: No such file",
    "process prompts --env.dataset afile.parquet": "cannot read afile.parquet: No such file",
    "process prompts --env.dataset foreign/rollouts.jsonl": "row 1: no column 'prompt' (env.prompt_field)",
    "process prompts --env.dataset foreign/rollouts.jsonl --env.promt_field x": "did you mean 'prompt_field'?",
    "process terminal_tasks --env.judge.votes 0": "greater than or equal to 1",
    "process terminal_tasks --env.judge.votes 3 --env.judge.temperature 0": "are all the same: raise `temperature`",
    "process terminal_tasks --env.judge.vote 3": "did you mean 'votes'?",
    f"process terminal_tasks {FAST} --env.judge.server_type standin --env.judge.options.policy x": "env.judge.options",
    f"process terminal_tasks {FAST} --env.user.base_url http://127.0.0.1:9": "correct env.user.base_url",
    "process terminal_tasks --env.user.max_replies 0": "greater than or equal to 1",
    "process terminal_tasks --env.mcp.a.where host": "give either `command` or `url`",
    "process terminal_tasks --env.mcp.a.command '[x]' --env.mcp.a.url http://x": "give either `command` or `url`",
    "process terminal_tasks --env.mcp.a.url x": "is not an address like http://",
    "process terminal_tasks --env.mcp.a.command '[nosuch]' --env.mcp.a.where host": "there is no program 'nosuch'",
    "process terminal_tasks --env.mcp.ä.command '[ls]'": "'ä' is not a name of letters, digits and _",
    # Settings of serve
    "serve terminal_tasks --env.rollout_server_url notaurl": "is not an address like http://",
    "serve terminal_tasks --env.rollout_server_url ''": "is not an address like http://",
    "serve terminal_tasks --env.rollout_server_url ftp://x": "is not an address like http://",
    "serve terminal_tasks --env.max_num_workers 0": "0 would start nothing",
    "serve terminal_tasks --env.max_num_workers -2": "greater than or equal to -1",
    "serve terminal_tasks --env.max_num_workers_per_node 0": "greater than or equal to 1",
    "serve terminal_tasks --env.min_batch_allocation 2": "less than or equal to 1",
    "serve terminal_tasks --env.eval_limit_ratio 5": "less than or equal to 1",
    "serve terminal_tasks --env.eval_handling never": "flag --env.eval_handling",
    "serve terminal_tasks --env.steps_per_eval -1": "greater than or equal to 0",
    "serve terminal_tasks --env.status_poll_s 0": "greater than 0",
    "serve terminal_tasks --env.outbox_groups 0": "greater than or equal to 1",
    "serve terminal_tasks --env.api_wait_s -1": "greater than or equal to 0",
    "serve terminal_tasks --env.drain_timeout_s -1": "greater than or equal to 0",
    # Slots
    f"process terminal_tasks {FAST} --env.pool.provider lokal": "did you mean 'local'?, or give module:Class",
    f"process terminal_tasks {FAST} --env.pool.provider json:JSONDecoder": "'json:JSONDecoder' is not a provider",
    f"process terminal_tasks {FAST} --env.pool.provider nosuch:Thing": "cannot be loaded: No module named 'nosuch'",
    f"process terminal_tasks {FAST} --env.pool.provider_options.levl x": "unknown key 'levl'; did you mean 'level'?",
    "process ssh/terminal_tasks --env.pool.provider_options.machines -oX": "'-oX' is not the name of a machine",
    "process ssh/terminal_tasks --env.pool.provider_options.check_host_keys no": "'yes' or 'accept-new'",
    "process apptainer/terminal_tasks --env.pool.provider_options.binds data": "a bind is SOURCE, SOURCE:TARGET",
    "process apptainer/terminal_tasks --env.pool.provider_options.imag x": "did you mean 'image'?",
    f"process apptainer/terminal_tasks {FAST} --env.pool.start_attempts 1": "there is no image 'sandbox.sif'",
    "process daytona/terminal_tasks --env.pool.provider_options.auto_stop_minutes 0": "greater than or equal to 1",
    f"process slurm/terminal_tasks {FAST} --env.pool.start_attempts 1": "not inside a Slurm allocation",
    f"process terminal_tasks {FAST} --env.pool.state_dir afile/x": "afile/x",
    f"process terminal_tasks {FAST} --env.pool.scratch_dir afile/x": "afile",
    f"process terminal_tasks {FAST} --env.pool.state_dir corrupt": "pool.db",
    "process terminal_tasks --env.pool.slots_per_host 0": "greater than or equal to 1",
    "process terminal_tasks --env.pool.slots_per_host 20000": "less than or equal to 16384",
    "process terminal_tasks --env.pool.slots_per_hots 8": "did you mean 'slots_per_host'?",
    "process terminal_tasks --env.pool.min_hosts 9": "min_hosts (9) is above max_hosts",
    "process terminal_tasks --env.pool.min_isolation some": "'namespaces', 'landlock', 'uid' or 'plain'",
    # Models
    "process terminal_tasks --openai.server_type vlm": "'vllm'",
    "process terminal_tasks --openai.base_url notaurl": "is not an address like http://",
    "process terminal_tasks --openai.base_ulr http://x": "did you mean 'base_url'?",
    "process terminal_tasks --openai.timeout_s 0": "greater than 0",
    f"process terminal_tasks {FAST} --openai.options.policy god": "did you mean 'good'?",
    f"process terminal_tasks {FAST} --openai.options.policy nosuch:play": "cannot be imported",
    f"process terminal_tasks {FAST} --openai.options.polcy good": "unknown key 'polcy'; did you mean 'policy'?",
    f"process terminal_tasks {FAST} --openai.options.seed many": "openai.options.seed is a number, not 'many'",
    f"process terminal_tasks {FAST} --openai.server_type auto --openai.base_url http://127.0.0.1:9": "no model server",
    f"process terminal_tasks {FAST} --openai.server_type openai --openai.base_url http://x --openai.api_key_env XY": (
        "XY, which is not"
    ),
    "process terminal_tasks --openai.timeout_s abc": "flag --openai.timeout_s: openai.timeout_s: input",
    "process terminal_tasks --openai.server_type openai --openai.api_key_env NO": "base_url is missing",
    f"process learn/smollm2 {FAST} --openai.options.wights Q8_0": "did you mean 'weights'?",
    # Where to write
    "process terminal_tasks --out afile": "cannot write afile: File exists",
    "process terminal_tasks --out afile/x": "cannot write afile/x: Not a directory",
    "process terminal_tasks --out /proc/x": "cannot write /proc/x",
    "process terminal_tasks --out foreign": "foreign/rollouts.jsonl was not written by process or evaluate",
    "process terminal_tasks --out damaged": "damaged/groups.jsonl is damaged",
    "evaluate terminal_tasks --out afile/x": "cannot write afile/x: Not a directory",
    "evaluate terminal_tasks --out foreign": "choose another --out, or --fresh",
    "demo --out afile/x": "cannot write afile/x: Not a directory",
    "demo --out damaged": "damaged holds a run of process, evaluate or learn",
    "demo --tasks 0": "--tasks: 0 is too small: at least 1",
    "demo --tasks many": "'many' is not a whole number",
    "demo --seconds -1": "--seconds: -1 is too small",
    "demo --env.grup_size 3": "did you mean 'group_size'?",
    # Learn
    "learn --resume --fresh": "not both",
    "learn --resume --out nothing": "holds no run to resume",
    "learn --out afile/x": "cannot write",
    "learn --config nosuch": "no config file 'nosuch'",
    "learn --config terminal_tasks": "set openai.server_type to cpu-model",
    "learn --steps -1": "trainer.steps",
    "learn --steps many": "invalid int value: 'many'",
    "learn --minutes 0": "learn.minutes",
    "learn --control wild": "invalid choice: 'wild'",
    "learn --trainer.stepps 3": "did you mean 'steps'?",
    "evaluate --adapter nosuch.gguf": "no adapter at nosuch.gguf",
    "evaluate --adapter afile": "afile is not an adapter in GGUF",
    "evaluate --adapter void": "void is not an adapter in GGUF",
    "evaluate --adapter half.gguf": "half.gguf is not an adapter in GGUF",
    # Stored rollouts
    "verify": "required: FILE",
    "verify nosuch.jsonl": "cannot read nosuch.jsonl: No such file or directory",
    "verify afolder": "cannot read afolder/rollouts.jsonl: No such file or directory",
    "verify strange": "cannot read strange/rollouts.jsonl: Is a directory",
    "verify void": "void: no rollouts in it",
    "verify afile": "afile: line 1: ",
    "verify doubled.jsonl": "doubled.jsonl: line 2: the rollout 'g/0' stands in line 1 already",
    "verify foreign": "nothing to verify",
    "verify foreign --against ''": "--against: '' is not an address",
    "verify foreign --against notaurl": "--against: 'notaurl' is not an address",
    "verify foreign --positions 0": "--positions: 0 is too small: at least 1",
    "verify foreign --tolerance -1": "--tolerance: -1 is too small",
    "verify foreign --tolerance nan": "--tolerance: nan is too small",
    # Trust in scores
    "compare afolder foreign": "there is no rollouts.jsonl at afolder",
    "compare nosuch foreign": "there is no rollouts.jsonl at nosuch",
    "compare foreign": "required: B",
    "compare afile foreign": "afile, line 1",
    "compare foreign foreign --cluster colour": "invalid choice: 'colour'",
    "rescore nosuch": "there is no rollouts.jsonl at nosuch",
    "rescore foreign": "foreign is not a run of process or evaluate",
    "rescore afolder": "there is no rollouts.jsonl at afolder",
    "validate nosuch": "no config file 'nosuch'",
    "validate": "required: CONFIG",
    "validate terminal_tasks --limit 0": "--limit: 0 is too small: at least 1",
    "validate terminal_tasks --repeats 1": "--repeats: 1 is too small: at least 2",
    "validate terminal_tasks --split test": "invalid choice: 'test'",
    "validate terminal_tasks --out afile/x": "cannot write afile/x: Not a directory",
    "evaluate terminal_tasks --models a,,b": "--models 'a,,b': give different values",
    "evaluate terminal_tasks --seeds 0": "--seeds: 0 is too small: at least 1",
    "evaluate terminal_tasks --vary nope=1": "write a setting and its values",
    "evaluate terminal_tasks --vary env.nope=1,2": "unknown key 'nope' in 'env'",
    f"process terminal_tasks --env.quarantine nosuch.json {FAST}": "env.quarantine: cannot read nosuch.json",
    f"process terminal_tasks --env.quarantine afile {FAST}": "env.quarantine: afile is not JSON",
    f"process terminal_tasks --env.budget.tokens 0 {FAST}": "greater than 0",
    f"process terminal_tasks --env.budget.usd 1 {FAST}": "env.budget.usd needs openai.usd_per_mtok_prompt",
    f"process terminal_tasks --env.hack_meter.impossible 1.5 {FAST}": "less than or equal to 1",
    "config terminal_tasks --env.hack_meter.impossible 0.6 --env.hack_meter.tripwires 0.6": "together at most 1",
    f"process terminal_tasks --env.workspaces.max_mb 0 {FAST}": "greater than 0",
    "view nosuch.jsonl": "cannot read nosuch.jsonl",
    "view afolder": "cannot read afolder/rollouts.jsonl",
    "view afile": "afile, line 1",
    "view foreign --max-chars 5": "--max-chars: 5 is too small: at least 100",
    "view foreign --output afile/x.html": "cannot write afile/x.html: there is no folder afile",
    "view foreign --output afolder": "cannot write afolder",
    "view foreign --differences nosuch.json": "cannot read nosuch.json",
    "view foreign --differences afile": "afile was not written by `verify --against URL --differences FILE`",
    "view foreign --live --output x.html": "--output belongs to a page that is written: leave it out with --live",
    "view nosuch/run --live": "there is no run at nosuch",
    "view foreign --live --host 192.0.2.1": "cannot listen on 192.0.2.1:0",
    "view foreign --live --port -1": "--port: -1 is too small",
    "top nosuch/rollouts.jsonl": "there is no run at nosuch",
    "top afile": "afile: ",
    "top foreign --every 0": "--every: 0 is too small: at least 0.2",
    "compare foreign nosuch": "there is no rollouts.jsonl at nosuch",
    "compare foreign foreign --html afile/x.html": "cannot write afile/x.html",
    "export foreign": "required: --to",
    "export foreign --to nosuch": "invalid choice: 'nosuch'",
    "export nosuch --to atif": "there is no rollouts.jsonl at nosuch",
    "export afile --to inspect": "afile, line 1",
    "export foreign --to atif --out afile": "cannot write afile",
    "export foreign --to parquet --out p": "--to parquet needs the package pyarrow",
    "export foreign --to openai --min-score 2": "none of the 1 rollouts is exported (left out: 1 score)",
    "export foreign --to openai --outcome nosuch": "argument --outcome: invalid choice: 'nosuch'",
    "export foreign --to openai --best 0": "--best: 0 is too small: at least 1",
    "export foreign --to openai --pairs 1": "--pairs goes with --to trl",
    "export foreign --to trl --pairs 1": "no group has two rollouts that are 0.5 apart",
    "export foreign --to trl --pairs 1 --best 1": "give either --pairs or --best",
    "export foreign --to trl --pairs 1 --gap 0": "--gap: 0 is too small",
    "export foreign --to openai --similar 2": "--similar: 2 is not between 0 and 1",
    "export foreign --to openai --tokenizer nosuch/model": "no tokenizer 'nosuch/model' (--tokenizer)",
    "verify foreign --differences x.json": "--differences needs --against",
    "parse": "give either --parser NAME or --template FILE",
    "parse --parser hermess": "hermess",
    "parse --parser hermes --template afile": "give either",
    "parse --template nosuch": "cannot read nosuch",
    "parse --parser hermes --tools nosuch": "cannot read nosuch",
    "parse --parser hermes --tools afile": "afile is not JSON",
    "parse --jsonl --tools afile": "leave out --tools",
    # pool
    "pool": "required: ACTION",
    "pool nosuch": "invalid choice: 'nosuch'",
    "pool status --state-dir afile/x": "afile/x",
    "pool gc --state-dir afile/x": "afile/x",
    "pool check --state-dir afile/x --only exec": "afile/x",
    "pool status --state-dir corrupt": "pool.db",
    "pool gc --state-dir corrupt": "pool.db",
    "pool check --state-dir corrupt --only exec": "pool.db",
    "pool gc --provider nomd --state-dir s": "did you mean 'nomad'?",
    "pool images build --provider nomad": "invalid choice: 'nomad'",
    "pool image push": "invalid choice: 'push'",
    "pool image build --option hots=x": "did you mean 'host'?",
    "pool check --provider docker --option runtme=runsc": "did you mean 'runtime'?",
    "pool check --provider podman --option labels=x": "a label is key=value",
    "pool check --provider docker --option mounts=x": "a mount is SOURCE:TARGET",
    "pool check --provider docker --option host=nosuch": "an engine is named as one of unix://",
    "pool check --provider lokal": "did you mean 'local'?",
    "pool check --provider json:JSONDecoder": "'json:JSONDecoder' is not a provider",
    "pool check --provider json:nosuch": "cannot be loaded",
    "pool check --slots 0": "--slots: 0 is too small",
    "pool check --slots 99999": "slots_per_host: input should be less than or equal to 16384",
    "pool check --option level": "--option 'level' is not KEY=VALUE",
    "pool check --option levl=uid": "unknown key 'levl'; did you mean 'level'?",
    "pool check --min-isolation some": "invalid choice: 'some'",
    "pool check --only nosuch": "no check's id contains 'nosuch'",
    "pool check --scratch-dir afile/x --state-dir s --only exec": "afile",
    "pool bench --rounds 0": "--rounds: 0 is too small: at least 1",
    "pool bench --throughput-s -1": "--throughput-s: -1 is too small",
    "pool bench --throughput-s 0": "--throughput-s: 0 is too small",
    "pool bench --transfer-mb 0": "--transfer-mb: 0 is too small",
    "pool bench --many -1": "--many: -1 is too small",
    "pool bench --slots -4": "--slots: -4 is too small",
    "pool job --provider local": "are not started from a job",
    "pool job --option adress=x": "unknown key 'adress'; did you mean 'address'?",
    # model
    "model": "required: ACTION",
    "model put": "invalid choice: 'put'",
    # bench
    "bench": "required: NAME",
    "bench nosuch": "invalid choice: 'nosuch'",
    "bench loop --rollouts 0": "--rollouts: 0 is too small",
    "bench loop --turns 0": "--turns: 0 is too small",
    "bench loop --latency -1": "--latency: -1 is too small",
    "bench loop --repeat 0": "--repeat: 0 is too small",
    "bench tools --calls 0": "--calls: 0 is too small",
    "bench tools --scripts -1": "--scripts: -1 is too small",
    "bench tools --level foo": "invalid choice: 'foo'",
    "bench serve --sequences 0": "--sequences: 0 is too small",
    "bench serve --tokens 0": "--tokens: 0 is too small",
    "bench serve --groups -1": "--groups: -1 is too small",
}

FILES = {
    "afile": "some text\n",
    "void": "",
    "afolder/x": "",
    "strange/rollouts.jsonl/x": "",
    "list.yaml": "- a\n",
    "broken.yaml": "env:\n  [\n",
    "twice.yaml": "environment: terminal_tasks\nenv: {}\nenv: {}\n",
    "empty.yaml": "",
    "unknown_env.yaml": "environment: terminal_taks\n",
    "no_module.yaml": "environment: nosuchmodule:Env\n",
    "no_class.yaml": "environment: json:JSONDecoder\n",
    "unknown_key.yaml": "environment: terminal_tasks\nenv:\n  grup_size: 3\n",
    "unknown_pool_key.yaml": "environment: terminal_tasks\nenv:\n  pool:\n    min_host: 3\n",
    "bad_value.yaml": "environment: terminal_tasks\nenv:\n  group_size: 0\n",
    "true_for_number.yaml": "environment: terminal_tasks\nenv:\n  group_size: true\n",
    "huge_number.yaml": "environment: terminal_tasks\nenv:\n  sandbox:\n    pids: 99999999999999999999\n",
    "corrupt/pool.db": "this is not a database, " * 100,
    "half.gguf": "GGUF\x03\x00\x00\x00",
    "foreign/rollouts.jsonl": "",
    "damaged/groups.jsonl": "not json\n",
    "damaged/config.json": "{}",
    "damaged/rollouts.jsonl": "",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with files that are wrong in many ways, as the working directory of a user who has nothing else."""
    place = tmp_path / "place"
    for name, text in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    (place / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    line = record("g").to_json() + b"\n"
    (place / "foreign" / "rollouts.jsonl").write_bytes(line)
    (place / "doubled.jsonl").write_bytes(line * 2)
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return place


def contents(place):
    return {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_the_table_is_long_enough():
    assert len(ROWS) >= 120


def check(place, capsys, command, says):
    before = contents(place)
    assert main(shlex.split(command)) == 2
    printed = capsys.readouterr()
    *_, sentence = printed.err.splitlines()
    assert sentence.startswith("hermes-rl: ")
    assert says in sentence
    assert "Traceback" not in printed.err
    after = contents(place)
    assert {name for name in after.keys() - before.keys() if name.parts[0] != "s" and name.name != ".lock"} == set()
    assert {name: after.get(name) for name in before} == before


@pytest.mark.parametrize(("command", "says"), [pytest.param(*row, id=row[0] or "nothing") for row in ROWS.items()])
def test_bad_input_is_one_sentence(place, capsys, command, says):
    check(place, capsys, command, says)


@pytest.mark.parametrize("command", ["pool status", "pool gc", f"process terminal_tasks {FAST}", "demo --out o"])
@pytest.mark.parametrize("variable", ["HOME", "XDG_STATE_HOME"])
def test_a_place_that_cannot_be_written_is_one_sentence(place, capsys, monkeypatch, variable, command):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv(variable, str(place / "afile" / "x"))
    check(place, capsys, command, "afile/x")


def hermes_rl(*words, before=(), cwd, program=("-m", "environments.apps.cli.main")):
    return subprocess.run(
        [*before, sys.executable, *program, *words], cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )


def on_a_full_disk(folder):
    """Runs what follows with a folder that has room for 16 kB."""
    own = ["--map-root-user"] if os.getuid() else []
    mount = f'mount -t tmpfs -o size=16k tmpfs {shlex.quote(str(folder))} && exec "$@"'
    command = ["unshare", "--mount", *own, "sh", "-c", mount, "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mounts of one's own here")
    return command


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("view big.jsonl --output full/report.html", "full/report.html"),
        ("process terminal_tasks --env.total_steps 1 --env.group_size 4 --out full", "full/rollouts.jsonl"),
        ("demo --no-model --tasks 1 --out full", "full/rollouts.jsonl"),
    ],
)
def test_a_full_disk_is_one_sentence(place, command, file):
    (place / "full").mkdir()
    (place / "big.jsonl").write_bytes(record("g").to_json() + b"\n")
    done = hermes_rl(*shlex.split(command), before=on_a_full_disk(place / "full"), cwd=place)
    assert done.stderr.splitlines()[-1] == f"hermes-rl: cannot write {file}: No space left on device"
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_a_reader_that_leaves_is_no_fault(place):
    command = [sys.executable, "-m", "environments.apps.cli.main", "pool", "check", "--list"]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, b"")


def test_an_environment_of_ones_own_gets_the_same_sentences(place):
    program = ("-m", "environments.terminal_tasks")
    lost = ("--env.api_wait_s", "0", "--env.rollout_server_url", "http://127.0.0.1:9")
    done = hermes_rl("serve", *lost, cwd=place, program=program)
    assert done.stderr.splitlines()[-1].startswith(
        "python __main__.py: run-api at http://127.0.0.1:9 did not come back"
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    done = hermes_rl("prcess", cwd=place, program=program)
    assert done.stderr.startswith("python __main__.py: argument verb: invalid choice: 'prcess'")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_a_model_server_that_is_down_is_a_failed_run(place):
    words = "process terminal_tasks --env.total_steps 1 --env.group_size 2 --env.rollout_tries 1 --out o"
    down = "--openai.server_type openai --openai.base_url http://127.0.0.1:9/v1 --openai.api_key x"
    done = hermes_rl(*shlex.split(f"{words} {down}"), cwd=place)
    assert "all 2 rollouts were lost to infrastructure, 2 of them so: api_error" in done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
