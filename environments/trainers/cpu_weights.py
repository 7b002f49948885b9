"""Weights between Hugging Face's form, in which TRL trains, and the CPU server of hermes-rl (`UpdatableModel`)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_loop.local_models.cpu_model.weights import gguf_tensors, write_as


class CpuServerWeights:
    """`AsyncGRPOTrainer(weight_transfer=CpuServerWeights(front.url, front.model.path, folder))`."""

    def __init__(self, url: str, model: Path, folder: Path) -> None:
        """`model` is the GGUF that was served first; new ones are written to `folder`."""
        self._url, self._model, self._folder = url, model, folder
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._version = 0

    def init_weight_transfer(self) -> None:
        """Nothing to set up: the file is handed over by its name."""

    def pause(self) -> None:
        """Returns when no request is under way."""
        self._post("pause", {})

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Write a GGUF and have it served; sampling goes on with it."""
        arrays = ((name, tensor.float().cpu().numpy()) for name, tensor in iterator)
        path = self._folder / f"weights-{self._version}.gguf"
        write_as(self._model, path, "F16", gguf_tensors(self._model, arrays))
        self._post("weights", {"model": str(path), "version": str(self._version)})
        for old in self._folder.glob("weights-*.gguf"):
            if old != path:
                old.unlink()
        self._version += 1

    def resume(self) -> None:
        """Sampling goes on as soon as the new weights are served."""

    def destroy(self) -> None:
        """Nothing is held."""

    def _post(self, what: str, body: dict[str, str]) -> None:
        request = urllib.request.Request(f"{self._url}/control/{what}", json.dumps(body).encode(), method="POST")
        with self._open(request):
            pass


def hugging_face_copy(model: Path, target: Path) -> Path:
    """The GGUF as a folder that transformers loads, in float32. Blocking; needs torch."""
    from transformers import AutoModelForCausalLM, GgufConfig

    from agent_loop.local_models.cpu_model.gguf import transformers_tokenizer
    from agent_loop.local_models.standin.chatml import chatml_template

    whole = GgufConfig(dequantize=True)
    network = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, quantization_config=whole)
    for holder in (network, network.config):  # else it says that it is still quantized
        for mark in ("quantization_config", "hf_quantizer", "is_quantized", "quantization_method"):
            if hasattr(holder, mark):
                delattr(holder, mark)
    network.save_pretrained(target)
    transformers_tokenizer(model, chatml_template()).save_pretrained(target)
    return target
