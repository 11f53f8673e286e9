"""transformers' `generate` on the very tensors that minillm reads: what `bench --compare` runs against."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import SafetensorsFolder
from ..config import ModelConfig
from ..errors import RequestError
from ..gguf_file import GGUFFile
from .workload import Job


class _Clock:
    """A transformers streamer that keeps the time of each token. The first call brings the prompt."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def put(self, _value: Any) -> None:
        self.calls.append(time.perf_counter())

    def end(self) -> None:
        pass


class TransformersEngine:
    """Float32, greedy, with its KV cache and sdpa attention."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        try:
            import transformers
        except ImportError:
            raise RequestError("--compare transformers needs that package: pip install transformers") from None
        self.version = transformers.__version__
        config, tensors = _read(path)
        self.model = build(config, tensors).to(device)
        self.device = device

    @torch.inference_mode()
    def token_times(self, ids: Sequence[int], count: int) -> tuple[list[float], list[int]]:
        """As measure.Engine says."""
        clock, prompt = _Clock(), torch.tensor([list(ids)], device=self.device)
        started = time.perf_counter()
        # no end token is given, so none can end it
        output = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, use_cache=True,
            eos_token_id=None, pad_token_id=0, streamer=clock,
        )  # fmt: skip
        return [call - started for call in clock.calls[1:]], output[0, len(ids) :].tolist()

    @torch.inference_mode()
    def static_batches(self, jobs: Sequence[Job], size: int) -> None:
        """Jobs in their order, `size` at a time, padded on the left; a batch runs until its longest job is done."""
        for start in range(0, len(jobs), size):
            batch = jobs[start : start + size]
            width = max(len(job.prompt_token_ids) for job in batch)
            pads = [width - len(job.prompt_token_ids) for job in batch]
            ids = [[0] * pad + job.prompt_token_ids for pad, job in zip(pads, batch, strict=True)]
            mask = [[0] * pad + [1] * (width - pad) for pad in pads]
            self.model.generate(
                torch.tensor(ids, device=self.device), attention_mask=torch.tensor(mask, device=self.device),
                max_new_tokens=max(job.max_tokens for job in batch), do_sample=False, use_cache=True,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip


def _read(path: Path) -> tuple[ModelConfig, Mapping]:
    if path.is_file():
        file = GGUFFile(path)
        return file.config, file
    return ModelConfig.from_file(path), SafetensorsFolder(path)


def build(config: ModelConfig, tensors: Mapping):
    """A transformers model around the given float32 tensors: made without memory, then handed them.

    Raises RequestError for a config that transformers cannot express.
    """
    import transformers

    raw = {key: value for key, value in config.raw.items() if value is not None and key != "model_type"}
    if (config.rope_scaling or {}).get("rope_type") == "divisors":
        raise RequestError(
            "transformers has no name for this GGUF file's rotary scaling; compare the safetensors model"
        )
    theirs = transformers.AutoConfig.for_model(config.model_type, **raw)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=torch.float32, attn_implementation="sdpa")
    model.load_state_dict({name: tensors[name] for name in tensors}, assign=True, strict=False)
    model.tie_weights()
    rotary = model.model.rotary_emb  # its buffers are computed, not loaded
    model.model.rotary_emb = type(rotary)(config=theirs)
    if missing := [name for name, tensor in model.state_dict().items() if tensor.is_meta]:
        raise RequestError(f"transformers also wants tensor {missing[0]}, which the checkpoint does not hold")
    model.generation_config = transformers.GenerationConfig()  # a file's own defaults must not change the measurement
    return model.eval()
