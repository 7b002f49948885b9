"""The server process: one llama.cpp server, which ends when its owner does.

`python -m agent_loop.local_models.cpu_model OPTIONS_AS_JSON` writes its address as a line of JSON and serves until its
standard input closes. The kernel kills it when the owner dies without closing anything.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from agent_loop.own_process import end_with_parent


def build_params(options: dict[str, Any]) -> Any:
    """llama.cpp's parameters for these options."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.hostnames = ["127.0.0.1"]
    params.port = options["port"]
    params.n_parallel = options["parallel"]
    params.n_ctx = options["context_tokens"] * options["parallel"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    if options.get("poll") is not None:
        params.cpuparams.poll = params.cpuparams_batch.poll = options["poll"]
    params.n_threads_http = options["parallel"] + 4
    params.warmup = False
    params.cache_ram_mib = 0
    if options.get("state_folder"):
        params.slot_save_path, params.endpoint_slots = options["state_folder"], True
    if options.get("alias"):
        params.model_alias = {options["alias"]}
    if options.get("full_attention"):
        # Flash attention rounds keys and values to 16 bits, whatever the type of the cache. Over 300 sampled tokens
        # the largest difference was 0.021 with it, for either type, and 0.009 without it and with an F32 cache.
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if options.get("lora"):
        adapter = xllamacpp.CommonAdapterLoraInfo()
        adapter.path, adapter.scale = options["lora"], 1.0
        params.lora_adapters = [adapter]
    return params


def main() -> int:
    """Serve until the owner closes our input."""
    options = json.loads(sys.argv[1])
    end_with_parent(options["owner"])
    import xllamacpp

    server = xllamacpp.Server(build_params(options))
    sys.stdout.write(json.dumps({"url": server.listening_address}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    # llama.cpp's threads may still be at work; nothing of theirs outlives the process.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
