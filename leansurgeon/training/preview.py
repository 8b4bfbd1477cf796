"""`retrain --dry-run` and `--eval-only`: preview a training, or score a model as it is.

Neither leaves a file besides the prepared data. If a dry run has no data, `Synthetic` replaces it: published sizes or
those in the recipe, and batches of the right shapes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leansurgeon import tasks
from leansurgeon.checkpoints.model import Loaded
from leansurgeon.errors import LeanSurgeonError, plural
from leansurgeon.measure.data import inputs
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.tasks import Task
from leansurgeon.tasks.base import Batch, Overrides
from leansurgeon.training import data_loader, distributed, guards, objective, schedule, setup, starting
from leansurgeon.training.evaluator import evaluate_model
from leansurgeon.training.recipe import reading
from leansurgeon.training.recipe.schema import TrainingRecipe

# Training and evaluation samples, as published by the authors.
SIZES = {
    "imagenet": (1_281_167, 50_000),
    "cifar10": (50_000, 10_000),
    "fashion-mnist": (60_000, 10_000),
    "lra-text": (25_000, 25_000),
    "lra-retrieval": (147_086, 18_090),
}
_ANY = 2**40  # size unknown: more than a batch


class Synthetic(data_loader.TaskProxy):
    """Replaces a `task` whose data is missing. Call `know` before `batch`."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        options, known = task.options, SIZES.get(task.name)
        train, evaluation = (
            getattr(options, split, None) or getattr(options, f"{split}_samples", None) for split in ("train", "eval")
        )
        if isinstance(train, int) and isinstance(evaluation, int):  # a task that generates its data
            known = train, evaluation
        elif known and isinstance(train, int):
            known = train, known[1]
        self.sizes = known

    def size(self, split: str) -> int:
        return self.sizes[split == "eval"] if self.sizes else _ANY

    def model_overrides(self) -> Overrides:
        """Return the overrides that the task knows without its data."""
        try:
            return self._task.model_overrides()
        except (KeyError, AttributeError, RuntimeError):
            named = {"num_labels": "classes", "image_size": "image_size", "num_channels": "channels"}
            options = ((key, getattr(self._task.options, option, None)) for key, option in named.items())
            return {key: value for key, value in options if value is not None}

    def know(self, loaded: Loaded) -> None:
        """Take from the model what the recipe leaves open: image size, vocabulary."""
        self._loaded = loaded

    def batch(self, split: str, indices: np.ndarray, *, seed: int, epoch: int) -> Batch:
        count, loaded = len(indices), self._loaded
        length = getattr(self._task, "seq_len", None) or getattr(self._task.options, "seq_len", 128)
        batch = inputs.make(loaded.config, loaded.architecture, count, length, "cpu")
        if self._task.head in ("causal-lm", "masked-lm"):
            return batch | {"labels": batch["input_ids"].clone()}
        texts = {name: ids for name, ids in batch.items() if name.startswith("input_ids")}  # lra-retrieval has two
        masks = {name.replace("input_ids", "attention_mask"): torch.ones_like(ids) for name, ids in texts.items()}
        classes = self.model_overrides().get("num_labels") or 2
        return batch | masks | {"labels": torch.zeros(count) if classes == 1 else torch.arange(count) % classes}


def dry_run(
    recipe: TrainingRecipe,
    model_dir: Path,
    processes: int,
    *,
    cpu: bool,
    limit_batches: int | None,
    say: Say,
) -> tuple[JsonObject, str]:
    """Return the plan of a training with its costs, as a document for programs, and the resolved recipe as text.

    Prepares the data, since its size determines the steps. If that fails, reports it and takes sizes and shapes from
    the recipe. Then tries one micro batch of the real shapes, forward, backward and update, in this process. On a CPU
    this may take minutes, so the plan is shown first.
    """
    task, missing = tasks.make(recipe.task.name, recipe.task.options), None  # a wrong option ends the dry run
    try:
        task = setup.prepare_task(recipe, model_dir, say)
    except starting.Refused:
        raise
    except LeanSurgeonError as error:
        missing = error.message
        say(f"The data is missing: {missing}")
        say("The step uses made-up data, with the published sizes or those of the recipe.")
        task = Synthetic(task)
    accelerator = distributed.start_accelerator(cpu=cpu, train=recipe.train, say=say)
    task = data_loader.first_batches(task, recipe.train, limit_batches)
    loaded = starting.load_start(recipe, model_dir, task)
    if missing:
        task.know(loaded)  # through a proxy too
    sized = not missing or task.sizes is not None
    processes = max(processes, accelerator.num_processes)
    scheme = schedule.make_plan(
        recipe.train, task.size("train"), processes, cut_short=limit_batches is not None or not sized
    )
    first = task.batch("train", np.arange(scheme.micro), seed=recipe.train.seed, epoch=0)
    per_sample = count_flops(loaded, task, first, sparse_prediction=recipe.train.sparse_prediction)
    numbers = _numbers(scheme, task, loaded, per_sample, sized) | {
        "device": distributed.device_name(accelerator.device)
    }
    _show(numbers, say)
    say(f"Trying one micro batch of {len(first['labels'])} ...")
    less = f"Try --set train.micro_batch={scheme.micro // 2}." if scheme.micro > 1 else guards.LESS
    with guards.memory_explained(accelerator.device, f"for a micro batch of {scheme.micro}", less):
        # a step of one micro batch on one process
        train, parts = recipe.train, {"micro_batch": None, "batch_ramp": None, "parallel": "ddp"}
        alone = parts | {"duration": "1st", "batch": scheme.micro}
        alone["schedule"] = train.schedule.model_copy(update={"warmup": 0.0})
        micro = schedule.make_plan(train.model_copy(update=alone), len(first["labels"]), 1)
        trainer, _ = setup.make_trainer(loaded, task, accelerator, micro, model_dir)
        loss_sum, count, _ = trainer.step(0, [data_loader.to_device(first, accelerator.device)]).tolist()
    tried = {"first_loss": loss_sum / max(1.0, count)}
    _show(tried, say)
    plan_of = {"data": f"synthetic: {missing}" if missing else "prepared"} | numbers | tried
    document = {"schema_version": 1, "dry_run": True, "model": str(model_dir), "plan": plan_of}
    return document | {"recipe": recipe.model_dump(mode="json")}, reading.dump(recipe).rstrip("\n")


def count_flops(
    loaded: Loaded, task: Task, batch: dict[str, torch.Tensor], *, sparse_prediction: bool = True
) -> float | None:
    """Return forward and backward FLOPs of one sample, from a batch `(B, ...)`; None if they cannot be counted.

    Uses torch's own counter on tensors without memory (device "meta"), which counts attention too: on a CPU its fused
    kernel counts as nothing. Only matrix products and convolutions count; the rest is small. The head of a masked
    language model counts at the masked tokens only, unless `sparse_prediction` is off.
    """
    from torch.utils.flop_counter import FlopCounterMode

    if not (sparse_prediction and objective.head_of(loaded.model)):
        batch = objective.without_places(batch)
    try:
        shadow = copy.copy(loaded)
        shadow.model = distributed.without_memory(loaded.model).train()
        inputs = {key: value.to("meta") for key, value in batch.items()}
        counter = FlopCounterMode(display=False)
        with counter, torch.enable_grad():
            task.score(objective.predict(shadow, inputs), objective.labels_of_places(inputs)).loss_sum.backward()
        total = counter.get_total_flops()
    except Exception:  # a model whose control flow depends on values cannot run on meta tensors
        return None
    return total / len(batch["labels"]) if total else None


Numbers = dict[str, int | float | str | None]  # by displayed name


def _numbers(scheme: schedule.Plan, task: Task, loaded: Loaded, per_sample: float | None, sized: bool) -> Numbers:
    """Return the sizes and costs of the training. A value is None if unknown: in a timed training, or where data is
    missing and its size is not published.
    """
    train = scheme.train
    every = schedule.parse_duration(train.eval.every)
    known = not scheme.timed and (sized or schedule.parse_duration(train.duration).unit == "st")
    steps = scheme.steps if known else None
    return {
        "steps": steps,
        "steps_per_epoch": scheme.steps_per_epoch if sized else None,
        "epochs": scheme.epochs if sized and not scheme.timed else None,
        "batch": scheme.batch,
        "micro_batch": scheme.micro,
        "accumulation": scheme.accumulation,
        "processes": scheme.processes,
        "warmup_steps": scheme.warmup if known else None,
        "peak_lr": scheme.peak,
        "first_lr": scheme.lr(0) if known or scheme.timed else None,
        "last_lr": scheme.lr(steps - 1) if known else None,
        "eval_every_steps": every.steps(scheme.steps_per_epoch) if known and every.seconds is None else None,
        "train_samples": task.size("train") if sized else None,
        "eval_samples": task.size("eval") if sized else None,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "flops_per_step": per_sample and per_sample * scheme.batch,
        "flops": per_sample and steps and per_sample * scheme.position(steps),
    }


def _show(numbers: Numbers, say: Say) -> None:
    for key, value in numbers.items():
        if value is not None:
            text = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}"
            say(f"{key.replace('_', ' '):>18}  {text}")


def evaluation(recipe: TrainingRecipe, model_dir: Path, **options: Any) -> tuple[JsonObject, str]:
    """Return the scores of the model in `model_dir` on the evaluation data, as a document and as text. `options` are
    those of `evaluate_model`.
    """
    told = evaluate_model(recipe, model_dir, **options)
    metric = tasks.make(recipe.task.name, recipe.task.options).metric
    document = {"schema_version": 1, "model": str(model_dir), "task": recipe.task.name}
    document |= {"loss": told.loss, "samples": told.samples, "metrics": told.metrics}
    text = f"{metric.label} {metric.format_value(told.metric)}, loss {told.loss:.4f}, {plural(told.samples, 'sample')}"
    return document, text
