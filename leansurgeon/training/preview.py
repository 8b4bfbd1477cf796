"""What a training would be, and what a model is worth as it stands: `retrain --dry-run` and `--eval-only`.

Neither leaves a file, beside the prepared data.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from leansurgeon.errors import UsageError
from leansurgeon.training import engine, feed, flops, launch, plan, recipefile, setup
from leansurgeon.training.evaluate import evaluate
from leansurgeon.training.limit import Limited
from leansurgeon.training.recipe import TrainingRecipe
from leansurgeon.training.step import Scored


def dry_run(
    recipe: TrainingRecipe,
    model_dir: Path,
    processes: int,
    *,
    cpu: bool,
    limit_batches: int | None,
    as_json: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Print the resolved recipe (stdout) and the plan with its costs (stderr), or both as JSON; try one step.

    The data is prepared, since its size decides the steps. The step is one micro batch of the real shapes, forward,
    backward and update, in this process.
    """
    task, loaded, accelerator = _opened(recipe, model_dir, cpu, limit_batches, say)
    scheme = plan.make(recipe.train, task.size("train"), processes, cut_short=limit_batches is not None)
    first = task.batch("train", _rows(scheme.micro), seed=recipe.train.seed, epoch=0)
    per_sample = flops.of_training(loaded, task, {key: value[:1] for key, value in first.items()})
    trainer, _, _ = setup.make_trainer(
        recipe, loaded, task, accelerator, plan.make(_alone(recipe, scheme), len(first["labels"]), 1), model_dir
    )
    seconds = []
    for step in range(2):  # the first one warms up
        clock = time.perf_counter()
        loss = trainer.step(step, [feed.to_device(first, accelerator.device)]).tolist()
        seconds.append(time.perf_counter() - clock)
    numbers = {
        "steps": None if scheme.timed else scheme.steps,
        "steps_per_epoch": scheme.steps_per_epoch,
        "epochs": None if scheme.timed else scheme.epochs,
        "batch": scheme.batch,
        "micro_batch": scheme.micro,
        "accumulation": scheme.accumulation,
        "processes": scheme.processes,
        "warmup_steps": None if scheme.timed else scheme.warmup,
        "peak_lr": recipe.train.optim.lr,
        "first_lr": scheme.lr(0),
        "eval_every_steps": scheme.eval_every or None,
        "train_samples": task.size("train"),
        "eval_samples": task.size("eval"),
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "flops_per_step": per_sample and per_sample * scheme.batch,
        "flops": (per_sample and not scheme.timed and per_sample * scheme.position(scheme.steps)) or None,
        "first_loss": loss[0] / max(1.0, loss[1]),
        "micro_step_ms": 1000 * seconds[-1],
        "device": engine.device_name(accelerator),
    }
    if launch.rank() > 0:
        return numbers
    if as_json:
        document = {"schema_version": 1, "dry_run": True, "model": str(model_dir), "plan": numbers}
        print(json.dumps(document | {"recipe": recipe.model_dump(mode="json")}))
        return numbers
    sys.stdout.write(recipefile.dump(recipe))
    for key, value in numbers.items():
        if value is not None:
            say(f"{key.replace('_', ' '):>18}  {value if isinstance(value, str) else f'{value:g}'}")
    return numbers


def evaluation(
    recipe: TrainingRecipe,
    model_dir: Path,
    processes: int,
    *,
    cpu: bool,
    limit_batches: int | None,
    as_json: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Print what the model in `model_dir` reaches on the evaluation data: one line, or one JSON document."""
    if processes > 1 and not launch.is_worker():
        raise UsageError("--eval-only runs on one process.", "Start it with torchrun for several.")
    task, loaded, accelerator = _opened(recipe, model_dir, cpu, limit_batches, say)
    scored = Scored(loaded, task, precision=recipe.train.precision).to(accelerator.device)
    result = evaluate(scored, task, accelerator, batch=recipe.train.eval.batch)
    told = {"loss": result.loss, "samples": result.samples, "metrics": result.metrics}
    if launch.rank() > 0:
        return told
    if as_json:
        print(json.dumps({"schema_version": 1, "model": str(model_dir), "task": task.name} | told))
        return told
    metric = task.metric
    shown = f"{100 * result.metric:.2f} %" if metric.percent else f"{result.metric:.4g}"
    print(f"{metric.label} {shown}, loss {result.loss:.4f}, {result.samples} samples")
    return told


def _opened(
    recipe: TrainingRecipe, model_dir: Path, cpu: bool, limit_batches: int | None, say: Callable[[str], None]
) -> tuple[Any, Any, Any]:
    from leansurgeon import checkpoints

    task = setup.prepared_task(recipe, model_dir, say)
    if limit_batches is not None:
        task = Limited(task, limit_batches * recipe.train.batch, limit_batches * recipe.train.eval.batch)
    accelerator = engine.start(cpu=cpu, say=say)
    torch.manual_seed(recipe.train.seed)
    return task, checkpoints.load(model_dir, task.head, task.model_overrides()), accelerator


def _rows(count: int) -> Any:
    import numpy as np

    return np.arange(count)


def _alone(recipe: TrainingRecipe, scheme: plan.Plan) -> Any:
    """The training of one micro batch on one process, for two steps."""
    small = {"duration": "2st", "batch": scheme.micro, "micro_batch": None, "batch_ramp": None}
    small["schedule"] = recipe.train.schedule.model_copy(update={"warmup": 0.0})
    return recipe.train.model_copy(update=small)
