"""The job a pool registers: one parameterized batch job per version of what it runs; each host is one dispatch of it.

The scheduler must never restart, reschedule or replace anything by itself. A host that Nomad started again would be an
empty one under an old name; the pool replaces hosts under new names.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sandbox_pool.providers.base import ProviderContext
from sandbox_pool.providers.nomad.nomad_options import NomadOptions
from sandbox_pool.providers.remote_start import loader_text

Json = dict[str, Any]
GROUP = "host"
TASK = "slot-server"
PORT = "slot"
META_HOST = "hermes_host"
META_OWNER = "hermes_owner"
META_TOKEN = "hermes_token_sha256"
SECOND_NS = 10**9
KILL_TIMEOUT_S = 10
LOG_MB = 2


def render_job(options: NomadOptions, context: ProviderContext, server_sha256: str, image: str | None = None) -> Json:
    """The job as Nomad's HTTP interface takes it. Its id carries a hash of everything in it."""
    job: Json = {
        "Type": "batch",
        "Datacenters": list(options.datacenters),
        "NodePool": options.node_pool,
        "Namespace": options.namespace,
        "Priority": options.priority,
        "Constraints": [_constraint(text) for text in options.constraints],
        "ParameterizedJob": {"Payload": "forbidden", "MetaRequired": [META_HOST, META_OWNER, META_TOKEN]},
        "TaskGroups": [
            {
                "Name": GROUP,
                "Count": 1,
                "RestartPolicy": {"Attempts": 0, "Mode": "fail", "Interval": 24 * 3600 * SECOND_NS, "Delay": SECOND_NS},
                "ReschedulePolicy": {"Attempts": 0, "Unlimited": False},
                # When a node is cut off, Nomad starts another one elsewhere, whatever the policies above say, unless
                # both are here: without LostAfter, Replace has no effect (observed with 1.10.5).
                "Disconnect": {"Replace": False, "LostAfter": int(max(context.owner_ttl_s, 1.0) * SECOND_NS)},
                "EphemeralDisk": {"SizeMB": options.disk_mb, "Migrate": False, "Sticky": False},
                "Networks": [{"DynamicPorts": [_port(options)]}],
                "Tasks": [_task(options, context, server_sha256, image or options.image)],
            }
        ],
    }
    if options.region:
        job["Region"] = options.region
    digest = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:10]
    return {"ID": f"{options.job_prefix}-{digest}", "Name": f"{options.job_prefix}-{digest}", **job}


def _port(options: NomadOptions) -> Json:
    return {"Label": PORT, **({"HostNetwork": options.host_network} if options.host_network else {})}


def _constraint(text: str) -> Json:
    words = text.split()
    if len(words) != 3:
        raise ValueError(f"a constraint is three words such as `${{node.class}} = large`, not {text!r}")
    return {"LTarget": words[0], "Operand": words[1], "RTarget": words[2]}


def _task(options: NomadOptions, context: ProviderContext, server_sha256: str, image: str | None) -> Json:
    memory: Json = {"CPU": options.cpu_mhz, "MemoryMB": options.memory_mb}
    if options.memory_max_mb:
        memory["MemoryMaxMB"] = options.memory_max_mb
    task: Json = {
        "Name": TASK,
        "Driver": "docker" if options.driver == "docker" else "raw_exec",
        "Config": _driver_config(options, context, image),
        "Env": _environment(options, context, server_sha256),
        "Resources": memory,
        "KillTimeout": KILL_TIMEOUT_S * SECOND_NS,
        "KillSignal": "SIGTERM",
        "LogConfig": {"MaxFiles": 1, "MaxFileSizeMB": LOG_MB},
        "RestartPolicy": {"Attempts": 0, "Mode": "fail", "Interval": 24 * 3600 * SECOND_NS, "Delay": SECOND_NS},
    }
    # A container's capabilities are root's alone, whatever user its image names.
    user = options.user or ("root" if options.driver == "docker" else None)
    if user:
        task["User"] = user
    return task


def _environment(options: NomadOptions, context: ProviderContext, server_sha256: str) -> dict[str, str]:
    """What the loader needs to know. Nomad fills in the `${...}` on the node."""
    published = options.driver == "docker" and options.network_mode != "host"
    scratch = f"{context.scratch_dir}/${{NOMAD_ALLOC_ID}}" if context.scratch_dir else f"${{NOMAD_TASK_DIR}}/{TASK}"
    return {
        "HRL_BIND": "0.0.0.0" if published else f"${{NOMAD_IP_{PORT}}}",
        "HRL_PORT": f"${{NOMAD_PORT_{PORT}}}",
        "HRL_SCRATCH": scratch,
        "HRL_SERVER_SHA256": server_sha256,
        "HRL_SERVER_PATH": options.server_path or "",
        "HRL_TOKEN_SHA256": f"${{NOMAD_META_{META_TOKEN}}}",
        "HRL_LOAD_S": f"{options.ready_timeout_s:g}",
    }


def _server_arguments(options: NomadOptions, context: ProviderContext, image: str | None) -> list[str]:
    return context.server_arguments(f"${{NOMAD_META_{META_HOST}}}", options.level, image)


def _driver_config(options: NomadOptions, context: ProviderContext, image: str | None) -> Json:
    if options.driver == "raw_exec":
        return {"command": options.python, "args": ["-c", loader_text(), *_server_arguments(options, context, None)]}
    if not image:
        raise ValueError(f"the {options.driver} driver needs an image: set `image` in provider_options")
    program = ["-c", loader_text(), *_server_arguments(options, context, image)]
    if options.driver == "apptainer":
        binds = [flag for volume in options.volumes for flag in ("--bind", volume)]
        # The job's own folders keep their paths inside; nothing else of the node is mounted but what is asked for.
        inside = ["exec", "--no-home", "--bind", "${NOMAD_ALLOC_DIR}", "--bind", "${NOMAD_TASK_DIR}"]
        if context.scratch_dir:
            inside += ["--bind", str(context.scratch_dir)]
        return {
            "command": options.apptainer,
            "args": [*inside, *binds, *options.apptainer_args, image, options.python, *program],
        }
    config: Json = {
        "image": image,
        "entrypoint": [options.python],
        "args": program,
        "network_mode": options.network_mode,
        "force_pull": options.force_pull,
        "privileged": options.privileged,
        # Zombies of commands that outlive their shell are reaped.
        "init": True,
    }
    if options.network_mode != "host":
        config["ports"] = [PORT]
    for name in ("cap_add", "security_opt", "volumes"):
        if getattr(options, name):
            config[name] = list(getattr(options, name))
    if context.scratch_dir:
        config["volumes"] = [*config.get("volumes", []), f"{context.scratch_dir}:{context.scratch_dir}"]
    return config
