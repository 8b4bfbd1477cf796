"""What a model is worth as it stands, on the evaluation data of a recipe's task."""

from __future__ import annotations

from pathlib import Path

from leansurgeon.progress import Say, silent
from leansurgeon.training import setup, starting
from leansurgeon.training.data.limit import first_batches
from leansurgeon.training.evaluate import Evaluation, evaluate
from leansurgeon.training.processes import engine
from leansurgeon.training.recipe.schema import TrainingRecipe
from leansurgeon.training.update import distill
from leansurgeon.training.update.step import Scored
from leansurgeon.training.watch import guards


def evaluate_model(
    recipe: TrainingRecipe,
    model_dir: Path,
    *,
    cpu: bool = False,
    limit_batches: int | None = None,
    say: Say = silent,
) -> Evaluation:
    """Loss, samples and metrics of the model, by all processes of the group together. Raises what `evaluate` does."""
    accelerator = engine.start(cpu=cpu, train=recipe.train, say=say)
    with accelerator.local_main_process_first():
        task = setup.prepared_task(recipe, model_dir, say)
    task = first_batches(task, recipe.train, limit_batches)
    train, device = recipe.train, accelerator.device
    with guards.memory_explained(accelerator, lambda: guards.SMALLER):
        loaded = starting.loaded(recipe, model_dir, task)
        loaded.model.to(device)
        # Where a task has no labels, the teacher judges.
        features = task.head == distill.FEATURES
        judge = distill.of_recipe(train, loaded, task, model_dir, device) if features else None
        options = {"precision": train.precision, "sparse_prediction": train.sparse_prediction}
        scored = Scored(loaded, task, distillation=judge, **options).to(device)
    return evaluate(scored, task, accelerator, batch=train.eval.batch, workers=train.workers)
