"""Measure the cost of inference: bytes on disk, peak memory, and seconds for one sample and for a full batch. All
models are timed alternately in one run, so that other load on the machine affects all alike. Imports torch.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.costs.memory import Setting
from leansurgeon.measure.costs.speed import TimedModel, time_in_turns
from leansurgeon.measure.costs.storages import Storages
from leansurgeon.measure.data import inputs
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject

NAME = "inference.json"  # in the folder of a run
BATCH, TOKENS = 8, 128
ROUNDS = 9


def measure(folders: Sequence[Path], say: Say, seconds: float | None = None) -> Mapping[Path, JsonObject]:
    """Return the costs of every model by its folder: `size` and `memory` in bytes, `one` and `batch` in seconds with
    quartiles; `measured` is the same for all that were timed together. Stops after two rounds once `seconds` are over.
    Weights do not affect time, so random ones of the same shape are used, in fp32.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began, models = time.perf_counter(), {}
    for folder in folders:
        source = open_source(str(folder), weights=False)
        tokens = inputs.sample_tokens(None, source.config, source.architecture)
        models[folder] = TimedModel(
            source.config, source.architecture, Setting(BATCH, min(TOKENS, tokens), "fp32"), "auto", device
        )
    say(f"Timing {len(models)} models in turns: one sample, and batches of {BATCH}.")
    works = [
        {"one": partial(model.forward, model.single), "batch": partial(model.forward, model.large)}
        for model in models.values()
    ]
    left = None if seconds is None else seconds - (time.perf_counter() - began)
    times = dict(zip(models, time_in_turns(works, device, ROUNDS, left), strict=True))
    for model in models.values() if device.type == "cuda" else ():
        model.to("cpu")  # a peak is measured with one model alone on the device
    together = uuid.uuid4().hex[:12]
    return {
        folder: {
            "schema_version": 1,
            "measured": together,
            "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
            "threads": torch.get_num_threads(),
            "load": {"batch": BATCH, "tokens": model.load.tokens, "precision": "fp32"},
            "size": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
            "memory": peak(model),
        }
        | {name: timing.as_dict() for name, timing in times[folder].items()}
        for folder, model in models.items()
    }


def peak(model: TimedModel) -> int:
    """Return the peak bytes of weights and activations for a full batch: from the allocator on a GPU, else counted."""
    if model.device.type == "cuda":
        model.to(model.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(model.device)
        model.forward(model.large)
        found = torch.cuda.max_memory_allocated(model.device)
        model.to("cpu")
        return found
    with Storages("activations", 1) as count:
        count.tag([*model.model.parameters(), *model.model.buffers()], "weights")
        model.forward(model.large)
    return count.peak
