"""`hermes-rl evaluate --adapter`."""

from __future__ import annotations

import struct

import pytest

from environments.apps.cli.evaluate import adapter_settings
from environments.errors import UsageError
from support.learn_program import tiny_config


def test_an_adapter_is_served_with_a_config_that_serves_its_own_model(tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed (extra cpu-model)")
    source = tiny_config(tmp_path / "a.yaml")
    adapter = tmp_path / "adapter.gguf"
    with pytest.raises(UsageError, match="no adapter at"):
        adapter_settings(str(source), adapter)
    adapter.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    assert adapter_settings(str(source), adapter) == ["--openai.options.lora", str(adapter)]
    with pytest.raises(UsageError, match="cpu-model"):
        adapter_settings("terminal_tasks", adapter)
