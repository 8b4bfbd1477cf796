"""Set up a training from a recipe, a model folder and a run folder: device, data, model, plan, optimizer."""

from __future__ import annotations

import shlex
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from leansurgeon import tasks
from leansurgeon.checkpoints.publish.durable import sweep
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import LeanSurgeonError, UsageError, plural
from leansurgeon.measure.costs.memory import checkpoint_activations
from leansurgeon.measure.data.choose_task import check_classes, check_objective, choose_classes, name_classes
from leansurgeon.progress import Say
from leansurgeon.rank import cores
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.training import (
    distill,
    distributed,
    guards,
    observe,
    optimizer,
    regularize,
    schedule,
    starting,
    state,
)
from leansurgeon.training.data_loader import first_batches
from leansurgeon.training.objective import Objective
from leansurgeon.training.processes.agree import ProcessGroup
from leansurgeon.training.processes.signals import StopSignals
from leansurgeon.training.recipe.reading import dump
from leansurgeon.training.recipe.schema import Train, TrainingRecipe
from leansurgeon.training.runs import checkpoint
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.resume import check_data, origin_of, point
from leansurgeon.training.state import History, Run

if TYPE_CHECKING:
    from accelerate import Accelerator

    from leansurgeon.checkpoints.model import Loaded

COMPILE_BACKEND = "inductor"  # torch's default


def prepare_task(recipe: TrainingRecipe, model_dir: Path, say: Say) -> tasks.Task:
    """Return the recipe's task with its data prepared. Slow the first time: call it before a process group exists."""
    task = open_task(recipe, model_dir, say)
    found = None
    if task.data_classes and not recipe.train.new_head and (model_dir / "config.json").is_file():
        source = open_source(str(model_dir))
        found = choose_classes(task, source) if source.learned else None
    named = name_classes(task, found, cache_folder(), model_dir)
    if named is not task:
        say(found.says)
    starting.check_tokenizer(recipe, named, model_dir)
    return named


def open_task(recipe: TrainingRecipe, model_dir: Path, say: Say) -> tasks.Task:
    """Return the recipe's task with its data prepared and its classes in the data's own order."""
    task = tasks.make(recipe.task.name, starting.image_options(recipe, model_dir, say))
    task.prepare(cache_folder(), model_dir, workers=cores(), say=say)
    return task


def for_classes(recipe: TrainingRecipe, model_dir: Path, say: Say) -> TrainingRecipe:
    """Return the recipe for a trained classifier, with a new head where the data has other classes; report which.

    Raises `UsageError` if the head's outputs are not classes, or do not agree with the data (`check_classes`).
    """
    if recipe.train.new_head or not (model_dir / "config.json").is_file():
        return recipe
    source = open_source(str(model_dir))
    if not (source.learned and source.outputs):
        return recipe  # training will add the head
    try:
        task = open_task(recipe, model_dir, say)
    except LeanSurgeonError:
        return recipe  # training, or a look at shapes alone, will report it
    if task.head != "features" and (objective := getattr(task, "objective", task.data_classes and "class")):
        check_objective(source, objective)
    if (found := choose_classes(task, source)) is None:
        return recipe
    if found.new_head:
        say(f"{found.says}: it gets a new head for {', '.join(found.names[:6]) or 'scores'}.")
        return recipe.model_copy(update={"train": recipe.train.model_copy(update={"new_head": True})})
    say(found.says)
    task = name_classes(task, found, cache_folder(), model_dir)
    if "class_names" not in recipe.task.options:  # else the user named the classes
        check_classes(source, task, found, chance=source.record is None)
    if task.options.class_names is None:
        return recipe
    choice = recipe.task.model_copy(update={"class_names": task.options.class_names})
    return recipe.model_copy(update={"task": choice})


def ready(
    recipe: TrainingRecipe,
    model_dir: Path,
    run_dir: Path,
    progress: observe.Progress,
    *,
    loaded: Loaded | None = None,
    task: tasks.Task | None = None,
    cpu: bool = False,
    replace: bool = False,
    resume: str = "never",
    resume_anyway: bool = False,
    limit_batches: int | None = None,
) -> Run:
    """Return a training at its first step, or resumed from its checkpoint. A training that is refused leaves no folder.

    `loaded` and `task` (prepared) may be given instead of being opened. `cpu` ignores a GPU. `replace` discards an
    existing run in `run_dir`. `resume` ("never", "auto" or the path of a checkpoint) and `resume_anyway` are those of
    `runs.resume.point`. `limit_batches` shortens every epoch and evaluation.
    """
    observe.check_trackers(recipe.train.trackers)
    accelerator = distributed.start_accelerator(cpu=cpu, train=recipe.train, say=progress.say)
    group = ProcessGroup(accelerator.num_processes, accelerator.process_index)
    run_dir = group.share(lambda: run_dir)  # its name may contain the time
    origin = group.share(lambda: origin_of(model_dir))
    start = group.share(
        lambda: point(run_dir, recipe, origin, resume=resume, anyway=resume_anyway, replace=replace, say=progress.say)
    )
    saved = checkpoint.read_state(start) if start else None
    if task is None:
        with accelerator.local_main_process_first():
            task = prepare_task(recipe, model_dir, progress.say)
    task = first_batches(task, recipe.train, limit_batches)
    if saved:
        check_data(saved, task, anyway=resume_anyway)
    scheme = schedule.make_plan(
        recipe.train,
        task.size("train"),
        group.processes,
        micro_limit=saved and saved["micro"],
        cut_short=limit_batches is not None,
    )
    with guards.memory_explained(accelerator.device):
        if loaded is None:
            loaded = starting.load_start(recipe, model_dir, task)
        sharing = distributed.check_parallel(recipe.train, group.processes, progress.say)
        whole_model = distributed.copy_whole(loaded, main=group.rank == 0) if sharing else None
        trainer, judged = make_trainer(loaded, task, accelerator, scheme, model_dir, sharing)
        progress.steps = None if scheme.timed else scheme.steps
        run = Run(
            recipe,
            run_dir,
            task,
            loaded,
            judged,
            trainer,
            group,
            StopSignals(group),
            progress,
            observe.PeakMemory(accelerator.device),
            runfolder.MetricsLog(run_dir / runfolder.METRICS),
            History(),
            origin,
            whole_model=whole_model,
        )
        guards.fit_memory(run)
    try:  # last, so that a training that is refused leaves no folder in the way of the next try
        group.on_main(lambda: _take(run, start, saved, replace))
        run.place = runfolder.place_of(run_dir)
        if start:
            with guards.memory_explained(run.device):
                state.restore(run, start)
            run.history.resumed.append(run.history.done)
        run.trackers = observe.Trackers(recipe, run_dir, main=run.main)
    except BaseException:
        runfolder.release(run.lock)
        raise
    progress.say(_sentence(run, start))
    return run


def make_trainer(
    loaded: Loaded,
    task: tasks.Task,
    accelerator: Accelerator,
    scheme: schedule.Plan,
    model_dir: Path,
    sharing: bool = False,
) -> tuple[optimizer.Trainer, Objective]:
    """Return the trainer and the objective to evaluate and save: the model's or its average's. `sharing` says whether
    processes share the weights.
    """
    train, device = scheme.train, accelerator.device
    mixing = _set_model_for(train, task, loaded)
    loaded.model.to(device)
    average = optimizer.Average(loaded, train.ema) if train.ema else None
    distillation = distill.of_recipe(train, loaded, task, model_dir, device, sharing=sharing)

    def make_scored(of: Loaded, *, taught: bool = True) -> Objective:
        teacher = distillation if taught else None
        return Objective(of, task, train, teacher if of is loaded or teacher is None else teacher.of_copy(of)).train()

    scored = judged = make_scored(loaded)
    if average:  # without labels, the teacher also scores the average
        judged = make_scored(average.loaded, taught=task.head == "features").eval()
    rehearsal = None
    if sharing:  # before the optimizer, which must see the shards
        copied = distributed.make_rehearsal(loaded, make_scored, device, accelerator.num_processes)
        rehearsal = (lambda: _compile(copied())) if train.compile else copied
        for module in dict.fromkeys([scored, judged]):
            distributed.split_weights(module, device, accelerator.num_processes)
    # On a CPU, the fused form (three times as fast) is known to work with Adam on unsharded weights, without fp16's
    # scaler.
    adam = train.optim.name in ("adam", "adamw")
    on_cpu = device.type == "cpu" and adam and not sharing and train.precision != "fp16"
    made = optimizer.make_optimizer(scored, train.optim, fused=device.type == "cuda" or on_cpu)
    # The optimizer is not wrapped: Accelerate's wrapper checks for a package at every step (0.25 ms, measured).
    if train.compile:
        _compile(scored)
    wrapped = scored
    if not sharing:  # DDP if there are several processes
        with warnings.catch_warnings():
            # The new name of this option does not exist in every torch version that we support.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
            wrapped = accelerator.prepare(scored)
    pace = schedule.Pace(scheme)
    return optimizer.Trainer(accelerator, scored, wrapped, made, pace, average, mixing, rehearsal), judged


def _set_model_for(train: Train, task: tasks.Task, loaded: Loaded) -> regularize.BatchMixing | None:
    """Configure the model for training (dropout, drop path, activation checkpointing, freezing, LoRA) and return the
    batch mixing, if any.

    Raises `UsageError` for settings that do not fit the task or the model.
    """
    family = type(loaded.model).__name__
    if train.label_smoothing and task.head not in ("image-classification", "sequence-classification"):
        raise UsageError(
            f"label_smoothing is for classification, and task '{task.name}' is {task.head}.",
            "Leave train.label_smoothing out.",
        )
    mixing = regularize.BatchMixing(train, task) if train.mixes else None
    if train.dropout is not None:
        regularize.set_dropout(loaded.model, train.dropout, family)
    if train.drop_path:
        regularize.set_drop_path(loaded.model, train.drop_path, family)
    if train.activation_checkpointing:
        hint = "Leave train.activation_checkpointing out; a smaller train.micro_batch saves memory too."
        checkpoint_activations(loaded.model, family, hint)
    if train.frozen_embeddings or train.frozen_blocks:
        regularize.freeze_blocks(loaded, train.frozen_blocks)
    if train.lora:
        regularize.add_lora(loaded, train.lora, task)
    return mixing


def _compile(module: torch.nn.Module) -> torch.nn.Module:
    """Compile in place, so that no parameter name changes."""
    module.compile(backend=COMPILE_BACKEND)
    return module


def _take(run: Run, start: Path | None, saved: JsonObject | None, replace: bool) -> None:
    """Lock the run folder: create a new one, or update the recipe of one that is resumed."""
    if start is None:
        if run.folder.exists():
            runfolder.release(runfolder.hold(run.folder))
        # An unfinished run without a checkpoint has nothing to lose.
        done = (run.folder / runfolder.SUMMARY).exists() or checkpoint.newest(run.folder)
        runfolder.create(run.folder, replace=replace or not done)
    run.lock = runfolder.hold(run.folder)
    sweep(run.folder)
    if start is None or saved["recipe"] != run.recipe.model_dump(mode="json"):
        file = run.folder / runfolder.RECIPE
        call = ["leansurgeon", "retrain", str(run.loaded.folder), "--recipe", str(file)]
        runfolder.write_text(file, runfolder.with_call(shlex.join(call), dump(run.recipe)))
    # Incomplete, or newer than the one that was asked for: they will be written again.
    later = [path for path in checkpoint.all_of(run.folder) if start and path.name > start.name]
    if later:
        names = ", ".join(path.name for path in later)
        run.say(f"{names} in {later[0].parent} will be deleted: the training goes on from {start.name}.")
    for path in later:
        shutil.rmtree(path, ignore_errors=True)


def _sentence(run: Run, checkpoint_dir: Path | None) -> str:
    scheme = run.plan
    seed, precision, device = run.train.seed, run.train.precision, distributed.device_name(run.device)
    samples = f"{scheme.batch_at(0)} to {scheme.batch}" if scheme.ramp_steps else str(scheme.batch)
    length = (
        f"{run.train.duration} in steps of {plural(samples, 'sample')}"
        if scheme.timed
        else f"{plural(scheme.steps, 'step')} of {plural(samples, 'sample')} ({scheme.epochs:.4g} epochs)"
    )
    start = f"resumed after step {run.history.done} ({checkpoint_dir}); " if checkpoint_dir else ""
    return (
        f"{run.recipe.name}: {start}{length}, seed {seed}, {precision}, "
        f"{scheme.processes} x {device}, micro batch {scheme.micro} x {scheme.accumulation}"
    )
