"""Experiments: the original, lean variants and their controls, over several seeds, all trained with one recipe.

    original    the source itself, trained
    lean        cut from the trained original of the same seed (`init: transfer`), or started fresh, then trained;
                it is cut from the weights of the last step, since those of the best were chosen by the evaluation data
    control     the same depth with the original's heads; its MLP is solved for the nearest number of parameters

Every training runs in its own process, so that its peak memory is its own. An arm that an earlier call finished is
reused, and one that was interrupted resumes from its newest checkpoint; one with other settings is never replaced
without `force`.

`run` is the entry point. `arms` defines what every arm wants, `jobs` turns each training into a value and decides what
is reused, `side_by_side` runs them in processes, as many at a time as this machine can take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.errors import plural
from leansurgeon.experiment.arms import base_arm, choose_arms, list_wanted_shapes
from leansurgeon.experiment.jobs import check_interrupted, find_finished, make_jobs, prepare_data
from leansurgeon.experiment.side_by_side import default_parallel, drive
from leansurgeon.experiment.trials import choose_rates, make_starts
from leansurgeon.progress import Say, silent
from leansurgeon.training.processes.signals import raising
from leansurgeon.training.recipe.schema import ExperimentRecipe
from leansurgeon.training.runs.summary import Summary


def run(
    recipe: ExperimentRecipe,
    workspace: Path,
    *,
    arms: Sequence[str] | None = None,
    parallel: int | None = None,
    force: bool = False,
    say: Say = silent,
    processes: int = 1,
    cpu: bool = False,
    begin: Callable[[ExperimentRecipe], None] = lambda recipe: None,
) -> list[Summary]:
    """Run every arm at every seed; return the summaries in the order of the recipe's arms, then seeds.

    `arms` trains only these, and first the original if one of them is cut from it (default: all of the recipe); `force`
    retrains those that are named. Existing results of the other arms must have the same settings, and are returned with
    the rest.

    `parallel` trainings run side by side (default: one per CPU core, or one if there is a GPU), each on `processes`
    GPUs, or CPU processes if `cpu` is set. `begin` is called with the recipe once all checks have passed, and again
    once every arm has its learning rate. Raises what a training raises, and `UsageError` for an unknown arm or an
    existing arm with other settings.
    """
    source = open_source(recipe.source, config_changes=recipe.source_config or None, weights=False)
    first = base_arm(recipe)
    wanted = list_wanted_shapes(recipe, source)
    chosen = choose_arms(recipe, arms, wanted)
    parallel = parallel or default_parallel()
    recipe = for_trained_source(recipe, source, chosen, say)
    how = {"processes": processes, "cpu": cpu}
    jobs = make_jobs(recipe, workspace, wanted, first, parallel, **how)
    anew = {key for key in jobs if force and (arms is None or key[0] in arms)}
    if not recipe.rates:
        say(
            f"{recipe.name}: {plural(len(chosen), 'arm')} x {plural(len(recipe.seeds), 'seed')} = "
            f"{plural(len(chosen) * len(recipe.seeds), 'training')}, "
            f"{parallel} at a time"
        )
    done = {key: old for key, job in jobs.items() if key not in anew and (old := find_finished(job))}
    for key in jobs.keys() - anew:
        check_interrupted(jobs[key])
    jobs = {key: replace(job, anew=key in anew) for key, job in jobs.items() if key[0] in chosen}
    samples = prepare_data(recipe, say, chosen, source.folder).size("train")
    library = source.architecture.library
    begin(recipe)
    if taken := len(done.keys() & jobs.keys()):
        say(f"Reused from an earlier call: {plural(taken, 'training')} (--force runs them again).")
    with raising(
        "Stopped by a signal. Finished arms are kept, those in progress are saved; run the same command again."
    ):
        if recipe.cut_from == "source":
            make_starts({key: job for key, job in jobs.items() if key not in done}, source, say)
        if recipe.rates:
            recipe = choose_rates(recipe, jobs, chosen, parallel, samples, library, say, force=force)
            given = {"arms": arms, "parallel": parallel, "force": force, "say": say, "begin": begin}
            return run(recipe, workspace, **given, **how)
        drive(jobs, done, first, parallel, samples, say, library)
    return [done[name, seed] for name in recipe.arms for seed in recipe.seeds if (name, seed) in done]


def for_trained_source(recipe: ExperimentRecipe, source: Source, arms: Sequence[str], say: Say) -> ExperimentRecipe:
    """Return the recipe for a source with trained classes, with a new head in the first training if the data has other
    classes.

    Raises what `for_classes` raises, before anything is cut.
    """
    if not (source.learned and source.outputs and source.folder):
        return recipe
    from leansurgeon.training.setup import for_classes

    say = silent if recipe.task.options.get("class_names") else say  # the recipe names the classes itself
    first = {repr(recipe.task_of(arm)): recipe.training(transferred=False, arm=arm) for arm in arms}
    if not any(for_classes(training, source.folder, say).train.new_head for training in first.values()):
        return recipe
    train = recipe.train.model_copy(update={"new_head": True})
    return recipe.model_copy(update={"train": train, "retrain": {"new_head": False} | recipe.retrain})
