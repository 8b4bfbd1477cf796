"""Predicted peak memory of a run on a GPU, to stand beside the measured one. The rehearsal imports torch, so only for
such runs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from leansurgeon import architectures
from leansurgeon.errors import LeanSurgeonError
from leansurgeon.measure.costs.memory import Prediction, Setting
from leansurgeon.measure.costs.memory import predict as rehearse
from leansurgeon.reading import jsonfile
from leansurgeon.reading.jsonfile import value_at
from leansurgeon.reading.values import number, text
from leansurgeon.training.runs.folder import BEST, LAST
from leansurgeon.training.runs.summary import Summary


def predicted_of(run: Path, memory_kind: str, setting: tuple[tuple[str, Any], ...] | None) -> Prediction | None:
    """What `measure.costs.memory` predicts for the model, batch, precision and optimizer of a run.

    None on a CPU, whose peak is that of a whole process and no counterpart; where the model or its setting is not
    known; and for text whose length the recipe leaves to the task.
    """
    if "cuda" not in memory_kind.lower() or not setting:
        return None
    place = next((run / name for name in (LAST, BEST) if (run / name / "config.json").is_file()), None)
    return predict(place, setting) if place else None


def setting_of(summary: Summary) -> tuple[tuple[str, Any], ...] | None:
    """The fields of `measure.costs.memory.Setting`, as pairs, since they are looked up again for equal ones."""
    train = summary.recipe.get("train")
    if not summary.micro_batch or text(value_at(train, "parallel")) == "fsdp2":  # the rehearsal knows DDP alone
        return None
    setting = {
        "batch": summary.micro_batch,
        "tokens": number(value_at(summary.recipe, "task", "seq_len")),
        "precision": summary.precision or "fp32",
        "optimizer": text(value_at(train, "optim", "name"), "adamw"),
        "checkpointing": value_at(train, "activation_checkpointing") is True,
        "world_size": summary.world_size or 1,
    }
    # A task with text whose recipe leaves its length open: a guess would be no prediction.
    speaks = summary.throughput_unit.startswith("tokens")
    return None if speaks and not setting["tokens"] else tuple(setting.items())


@cache
def predict(place: Path, setting: tuple[tuple[str, Any], ...]) -> Prediction | None:
    """The peak memory rehearsed from the run's config and setting; None where it cannot be rehearsed."""
    config = jsonfile.read_object_if_whole(place / "config.json")
    if config is None:
        return None
    try:
        return rehearse(config, architectures.of(config), Setting(**dict(setting)))
    except (LeanSurgeonError, RuntimeError, ValueError, TypeError, KeyError):
        return None  # a report must not end because one model cannot be rehearsed
