"""The tasks: data, objective and metric of each benchmark, as classes with one interface.

Importing this package costs no torch: a task's own module is imported when the task is made, and torch, scikit-learn
and the tokenizers when its data is prepared or a batch is requested. Of leansurgeon it needs only the errors.

    task = make("digits", {"split_seed": 0})
    task.prepare(Path("cache"), None, workers=2, say=print)
    batch = task.batch("train", np.arange(64), seed=0, epoch=0)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from leansurgeon.errors import UsageError, did_you_mean
from leansurgeon.tasks.base import Score, Sums, Task

__all__ = ["TASKS", "Score", "Sums", "Task", "make"]

TASKS: dict[str, str] = {
    "digits": "leansurgeon.tasks.images.small:Digits",
    "fashion-mnist": "leansurgeon.tasks.images.small:FashionMnist",
    "cifar10": "leansurgeon.tasks.images.small:Cifar10",
    "imagenet": "leansurgeon.tasks.images.folder:ImageNet",
    "folder": "leansurgeon.tasks.images.folder:ImageFolder",
    "images": "leansurgeon.tasks.images.folder:Images",
    "listops": "leansurgeon.tasks.long_range.listops:ListOps",
    "lra-text": "leansurgeon.tasks.long_range.lra:LraText",
    "lra-retrieval": "leansurgeon.tasks.long_range.lra:LraRetrieval",
    "lra-image": "leansurgeon.tasks.long_range.lra:LraImage",
    "pathfinder": "leansurgeon.tasks.long_range.pathfinder:Pathfinder",
    "d-retrieval": "leansurgeon.tasks.long_range.d_retrieval:DRetrieval",
    "causal-lm": "leansurgeon.tasks.text.language:CausalLM",
    "masked-lm": "leansurgeon.tasks.text.language:MaskedLM",
    "sentences": "leansurgeon.tasks.text.sentences:Sentences",
    "text-classification": "leansurgeon.tasks.text.classification:TextClassification",
    "glue": "leansurgeon.tasks.text.glue:Glue",
}


def make(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Create the task `name` with these options (a recipe's `task:` without its `name`).

    Cheap: no data is read before `prepare`. Raises UsageError for an unknown name or option, or an invalid value.
    """
    if name not in TASKS:
        raise UsageError(f"There is no task '{name}'{did_you_mean(str(name), TASKS)}.", f"Tasks: {', '.join(TASKS)}.")
    module, attribute = TASKS[name].split(":")
    kind, options = getattr(importlib.import_module(module), attribute), options or {}
    schema = kind.Options
    unknown = [key for key in options if key not in schema.model_fields]
    if unknown:
        known = ", ".join(schema.model_fields)
        raise UsageError(
            f"Task '{name}' has no option '{unknown[0]}'{did_you_mean(str(unknown[0]), schema.model_fields)}.",
            f"Its options: {known}.",
        )
    try:
        valid = schema(**options)
    except ValidationError as error:
        first = error.errors()[0]
        what = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # concerns several options
            raise UsageError(f"Task '{name}': {what}.") from None
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"Task '{name}', option '{where}': {what} (got {first['input']!r}).") from None
    return kind(valid)
